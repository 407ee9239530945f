"""From a model's name to its configuration: bundled, a folder, or the hub; torch is imported for rare families only."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn

from planner import hub, model_families
from planner.config import TASKS
from planner.errors import InputError, Problem

Source = Literal["bundled", "folder", "hub"]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model's architecture, with no weights."""

    model_id: str
    """What ``from_pretrained`` takes: a hub id, or the absolute path of a folder."""
    config: dict[str, Any] = field(hash=False)
    """The plain content of ``config.json``."""
    source: Source
    """Where the config came from."""
    architecture: str
    """First entry of ``architectures``; empty where the file names none (DeBERTa-v3, Longformer)."""
    model_type: str
    """The transformers family."""
    default_task: str
    """What fine-tuning this model most likely means."""
    max_seq_len: int | None
    """Longest usable input in tokens; None where positions are relative and there is no hard limit."""
    remote_code: bool = False
    """The model runs code from its repository."""


@dataclass(frozen=True, kw_only=True)
class PublishedParameters:
    """A parameter count that somebody else published."""

    count: int
    """Parameters, each shared one counted once."""
    counted_class: str
    """The transformers class whose parameters are counted."""
    source: str
    """Who published it."""


def resolve_model(name: str, *, trust_remote_code: bool = False, task: str | None = None) -> ModelSpec:
    """Find the configuration of ``name``.

    A folder with a ``config.json`` (or the file itself) comes first, as in ``from_pretrained``; then the bundled
    models by hub id or alias, in any case; then the hub, which is given a few seconds. ``task`` is the user's own
    choice: it must be one that the model can do, and it settles what an unusual architecture leaves open.

    Raises InputError.
    """
    text = name.strip()
    path = Path(text).expanduser() if text else None
    if path is not None and (path.is_file() or (path / "config.json").is_file()):
        return _from_path(text, path, trust_remote_code, task)
    bundled = _bundled_id(text)
    if bundled is not None:
        return _spec(text, bundled, _bundled_config(bundled), "bundled", trust_remote_code, task)
    if path is not None and (path.is_dir() or _looks_like_path(text)):
        _refuse_path(text, path)
    if not _HUB_ID.fullmatch(text):
        _refuse(text, "accepted: a model id such as bert-base-uncased, or a folder with a config.json")
    return _from_hub(text, trust_remote_code, task)


def supported_tasks(spec: ModelSpec) -> tuple[str, ...]:
    """Return the tasks that transformers has a class for in this model's family, the usual one first."""
    return model_families.supported_tasks(spec.model_type)


def default_seq_len(spec: ModelSpec, task: str) -> tuple[int, str]:
    """Return the sequence length, in tokens, to plan for when the user names none, and the reason for it."""
    return model_families.default_seq_len(spec.config, task, spec.max_seq_len)


def fp16_unsafe(spec: ModelSpec) -> str | None:
    """Return why fp16 is likely to overflow in this model, or None."""
    return model_families.fp16_unsafe(spec.model_type)


def separate_output_layer(spec: ModelSpec) -> bool:
    """Say whether loading the checkpoint gives an output layer of its own where ``from_config`` ties it."""
    return model_families.separate_output_layer(spec.config)


def bundled_models() -> tuple[str, ...]:
    """Return the hub ids of the models whose configuration ships with the package."""
    return tuple(_index())


def published_parameters(model_id: str) -> PublishedParameters:
    """Return the published parameter count of a bundled model. Raises KeyError for any other."""
    entry = _index()[model_id]
    return PublishedParameters(
        count=entry["parameters"], counted_class=entry["parameters_of"], source=entry["parameters_source"]
    )


def near_matches(name: str, limit: int = 3) -> tuple[str, ...]:
    """Return the bundled ids that look most like ``name``, best first."""
    wanted = name.casefold()
    scores = dict.fromkeys(_index(), 0.0)
    for key, model_id in _names().items():
        scores[model_id] = max(scores[model_id], _likeness(wanted, key))
    best = sorted((-score, model_id) for model_id, score in scores.items() if score >= 0.6)
    return tuple(model_id for _, model_id in best[:limit])


def _likeness(wanted: str, key: str) -> float:
    short, short_key = wanted.rsplit("/", 1)[-1], key.rsplit("/", 1)[-1]
    # "deberta" is far from "deberta-v3-base" letter by letter, and yet what was meant.
    bonus = 0.5 if short_key.startswith(short) else 0.25 if short in short_key else 0.0
    pairs = ((wanted, key), (short, short_key))
    return bonus + max(difflib.SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs)


@cache
def _index() -> dict[str, Any]:
    return _read_bundled("models_index.json")


@cache
def _names() -> dict[str, str]:
    """Every name that a bundled model answers to, in lower case, with its id."""
    index = _index()
    return {key.casefold(): model_id for model_id, entry in index.items() for key in (model_id, *entry["aliases"])}


def _bundled_id(name: str) -> str | None:
    return _names().get(name.casefold())


def _bundled_config(model_id: str) -> dict[str, Any]:
    config = _read_bundled("models", _index()[model_id]["file"])
    del config["_source"]
    return config


def _read_bundled(*parts: str) -> dict[str, Any]:
    text = resources.files("planner.profiles").joinpath(*parts).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def _from_path(name: str, path: Path, trust: bool, task: str | None) -> ModelSpec:
    file = path if path.is_file() else path / "config.json"
    if file.suffix != ".json":
        _refuse(name, "this is a file; accepted: a config.json, or a folder that has one")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(name, f"{file.name} cannot be read ({error.strerror}); accepted: a readable config.json")
    except ValueError as error:
        _refuse(name, f"{file.name} is not valid JSON ({str(error).splitlines()[0]}); save the model's config again")
    if not isinstance(config, dict):
        _refuse(name, f"{file.name} is not a JSON object; accepted: a transformers config.json")
    return _spec(name, str(file.parent.resolve()), config, "folder", trust, task)


def _from_hub(name: str, trust: bool, task: str | None) -> ModelSpec:
    try:
        config = hub.fetch_config(name)
    except hub.HubFailureError as failure:
        _refuse(name, _hub_remedy(name, failure))
    return _spec(name, name, config, "hub", trust, task)


def _hub_remedy(name: str, failure: hub.HubFailureError) -> str:
    folder = "download its config.json elsewhere and pass the folder"
    near = near_matches(name)
    likely = f"near matches: {', '.join(near)}" if near else f"none of the {len(_index())} bundled models is near"
    remedies: dict[hub.FailureKind, str] = {
        "gated": f"it is gated: accept its licence at https://huggingface.co/{name} and set HF_TOKEN, or {folder}",
        "bad-token": "the hub refuses HF_TOKEN (invalid credentials); log in again, or unset it",
        "no-config": "its hub repository has no config.json (a GGUF or adapter repository?); pass the base model's id",
        "invalid": f"{failure.detail}; accepted: the id of a transformers model, or a folder with a config.json",
        "not-found": f"the hub has no such model, or it is private (then set HF_TOKEN); {likely}",
        "offline": f"not a bundled model, and HF_HUB_OFFLINE is set; {likely}; or unset it, or {folder}",
        "unreachable": f"not a bundled model, and the hub cannot be reached ({failure.detail}); {likely}; or {folder}",
    }
    return remedies[failure.kind]


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".json") or "\\" in name or name.count("/") > 1


def _refuse_path(name: str, path: Path) -> NoReturn:
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        _refuse(name, "this folder holds an adapter (adapter_config.json), not a model; pass its base model")
    if path.is_dir():
        _refuse(name, "the folder has no config.json; save the model's config there, or pass a model id")
    _refuse(name, "no such file or folder; accepted: a folder with a config.json, or a model id")


def _spec(name: str, model_id: str, config: dict[str, Any], source: Source, trust: bool, task: str | None) -> ModelSpec:
    """Check a config and put what the planner needs of it into a ModelSpec."""
    model_type = config.get("model_type")
    has_code = bool(config.get("auto_map"))
    if not isinstance(model_type, str) or not model_type:
        _refuse(name, 'config.json has no model_type; add it (for example "model_type": "bert")')
    remote = has_code and (trust or not model_families.known_to_transformers(model_type))
    if remote and not trust:
        _refuse(
            name,
            "the model needs code from its own repository (auto_map in config.json); read that code, then set "
            "trust_remote_code",
        )
    if not has_code and not model_families.known_to_transformers(model_type):
        _refuse(name, f"the installed transformers does not know model_type {model_type!r}; upgrade transformers")
    return ModelSpec(
        model_id=model_id,
        config=config,
        source=source,
        architecture=str((config.get("architectures") or [""])[0]),
        model_type=model_type,
        default_task=_checked_task(name, config, model_type, task, remote),
        max_seq_len=_limit(config, remote),
        remote_code=remote,
    )


def _checked_task(name: str, config: Mapping[str, Any], model_type: str, task: str | None, remote: bool) -> str:
    """Return the user's task if the model can do it, else the one that its architecture stands for."""
    derived = model_families.default_task(config)
    if task is None and derived is None:
        _refuse(name, f"neither its architecture nor model_type {model_type!r} tells the task; give one", "task")
    if task is None or remote:
        return task or str(derived)
    tasks = [name for name in model_families.supported_tasks(model_type) if name in TASKS]
    if task not in tasks:
        accepted = ", ".join(tasks) or "nothing that this version trains"
        message = f"got {task!r}; {name} ({model_type}) can do: {accepted}"
        raise InputError([Problem(argument="task", message=message)])
    return task


def _limit(config: Mapping[str, Any], remote: bool) -> int | None:
    limit = model_families.max_seq_len(config)
    if limit is not None or remote or not model_families.has_length_limit(config):
        return limit
    # A hand-written config may leave the limit to the class's default, which only transformers knows.
    from transformers import AutoConfig

    plain = {key: value for key, value in config.items() if key != "model_type"}
    return model_families.max_seq_len(AutoConfig.for_model(config["model_type"], **plain).to_dict())


def _refuse(name: str, message: str, argument: str = "model") -> NoReturn:
    raise InputError([Problem(argument=argument, message=f"got {name!r}; {message}")])
