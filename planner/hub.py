"""Fetches one ``config.json`` from the Hugging Face hub: from the cache if it is there, else quickly or not at all."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from typing import Any, Literal

DEADLINE_S = 6.0
"""Longest wait for the hub: a config.json is a few hundred bytes, and planning goes on without a network."""
_HEAD_TIMEOUT_S = 3.0

FailureKind = Literal["offline", "unreachable", "not-found", "gated", "bad-token", "no-config", "invalid"]


class HubFailureError(Exception):
    """The hub gave no config; ``kind`` says why and ``detail`` is one line for the reader."""

    def __init__(self, kind: FailureKind, detail: str = "") -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(f"{kind}: {detail}" if detail else kind)


def fetch_config(repo_id: str, *, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Return the repository's ``config.json``; a cached copy needs no network.

    Raises HubFailureError, within ``deadline_s`` seconds whatever the network does.
    """
    path = _cached(repo_id) or _download_within(repo_id, deadline_s)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HubFailureError("invalid", f"its config.json does not parse ({_first_line(error)})") from error
    if not isinstance(config, dict):
        raise HubFailureError("invalid", "its config.json is not a JSON object")
    return config


def _cached(repo_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError as error:
        raise HubFailureError("invalid", _first_line(error)) from error
    return Path(found) if isinstance(found, str) else None


def _download_within(repo_id: str, deadline_s: float) -> Path:
    # A thread, because name resolution and the hub client's retries have no overall time limit of their own.
    outcome: list[Path | BaseException] = []

    def work() -> None:
        try:
            outcome.append(_download(repo_id))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="hub-config", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not outcome:
        raise HubFailureError("unreachable", f"no answer within {deadline_s:g} s")
    if isinstance(outcome[0], BaseException):
        raise _classified(outcome[0])
    return outcome[0]


def _download(repo_id: str) -> Path:
    from huggingface_hub import get_session, hf_hub_download, hf_hub_url

    # Its public names are not re-exported in a way that type checkers accept.
    utils = importlib.import_module("huggingface_hub.utils")
    # One plain request first: hf_hub_download retries with growing pauses, half a minute when there is no network.
    url, headers = hf_hub_url(repo_id, "config.json"), utils.build_hf_headers()
    utils.hf_raise_for_status(get_session().head(url, headers=headers, timeout=_HEAD_TIMEOUT_S, follow_redirects=True))
    quiet_before = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        return Path(hf_hub_download(repo_id, "config.json", etag_timeout=_HEAD_TIMEOUT_S))
    finally:
        if not quiet_before:
            utils.enable_progress_bars()


def _classified(error: BaseException) -> HubFailureError:
    """Say what an exception of the hub client means for somebody who asked for a model."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    kind: FailureKind = "unreachable"
    # Order matters: a gated repository is a RepositoryNotFoundError too, a missing cache entry an EntryNotFoundError.
    # The hub says 401 for what does not exist, unless the token is at fault.
    if isinstance(error, errors.GatedRepoError) or status == 403:
        kind = "gated"
    elif status == 401 and "Invalid credentials" in str(error):
        kind = "bad-token"
    elif isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        kind = "not-found"
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        kind = "offline" if constants.HF_HUB_OFFLINE else "unreachable"
    elif isinstance(error, errors.EntryNotFoundError):
        kind = "no-config"
    elif isinstance(error, errors.HFValidationError):
        kind = "invalid"
    return HubFailureError(kind, f"HTTP status {status}" if status else _first_line(error.__cause__ or error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_offline() -> bool:
    """Whether the user said that there is no network (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
