"""bge-reranker-v2-m3 with 100 documents of 512 tokens on small cards: the plans, their levers, speed and bounds.

    python benchmarks/reranker_plans.py --out FILE.csv

Cards of 2, 4 and 8 GB as asked for; smaller ones, without room for all weights (plans that leave the table of token
embeddings in host memory and stream layers from there, with the bounds of their time); and those with too little host
memory, where nothing fits.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

from planner import NothingFitsError, plan

MODEL, DOCUMENTS, TOKENS = "BAAI/bge-reranker-v2-m3", 100, 512
ASKED: tuple[dict[str, Any], ...] = (
    {"vram": "8GB"},
    {"vram": "4GB"},
    {"vram": "2GB"},
    {"vram": "2GB", "precision": "fp32"},
    {"vram": "1GB"},
    {"vram": "800MB"},
    {"vram": "600MB"},
    {"vram": "1GB", "host_ram": "300MB"},
    {"vram": "600MB", "host_ram": "300MB"},
)
FIELDS = (
    *("precision", "quantization", "attention", "offload", "layers_on_card", "embedding_on_card"),
    "micro_batch_size",
)
COLUMNS = (
    *("vram", "host_ram", "card", "status", *FIELDS, "total_bytes", "ceiling_bytes", "documents_per_s"),
    *("seconds_for_all", "batch_ms", "lower_ms", "upper_ms", "reason"),
)


def row_of(asked: dict[str, Any], lengths: Path) -> dict[str, Any]:
    """One plan, or what the error says."""
    arguments = {"model": MODEL, "task": "reranking", "mode": "infer", "seq_len": TOKENS, "concurrency": DOCUMENTS}
    known = {"vram": asked["vram"], "host_ram": asked.get("host_ram", "")}
    try:
        found = plan(**arguments, lengths=str(lengths), **asked)
    except NothingFitsError as error:
        return {**known, "status": "nothing fits (exit 3)", "reason": " | ".join(str(error).splitlines())}
    config, time = found.config, found.time
    offload = next(reason.reason for reason in found.reasons if reason.field == "offload")
    return {
        **known,
        "card": found.hardware["name"],
        "status": "plan",
        **{name: getattr(config, name) for name in FIELDS},
        "total_bytes": found.peak.total_bytes,
        "ceiling_bytes": found.peak.ceiling_bytes,
        "documents_per_s": round(time.sequences_per_s, 2),
        "seconds_for_all": round(DOCUMENTS / time.sequences_per_s, 2),
        "batch_ms": round(time.step_ms, 1),
        "lower_ms": "" if time.lower_ms is None else round(time.lower_ms, 1),
        "upper_ms": "" if time.upper_ms is None else round(time.upper_ms, 1),
        "reason": offload,
    }


def main() -> None:
    """Plan each, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, arguments.out.open("w", newline="", encoding="utf-8") as file:
        lengths = Path(folder) / "lengths.txt"
        lengths.write_text(f"{TOKENS}\n" * DOCUMENTS, encoding="utf-8")
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for asked in ASKED:
            row = row_of(asked, lengths)
            writer.writerow(row)
            print(", ".join(f"{name} {value}" for name, value in row.items() if value not in ("", None)))


if __name__ == "__main__":
    main()
