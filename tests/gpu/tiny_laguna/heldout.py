"""Ask the exported model every held-out prompt through transformers, greedily, and print the table of passes.

Usage: heldout.py MODEL [--device cpu|cuda] [--count 100] [--json FILE]. Exit code 1 when a kind is below 95 %.
`--json -` prints the JSON instead of the table.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tasks
import torch
import transformers
from transformers import AutoTokenizer, LagunaForCausalLM

FLOOR = 0.95


def hub_messages(messages: list[tasks.Message]) -> list[tasks.Message]:
    """OpenAI messages with tool arguments parsed, as chat templates want them."""
    out = json.loads(json.dumps(messages))
    for m in out:
        for call in m.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return list(out)


def where(device: str) -> dict[str, str]:
    """The machine of a run, without its name."""
    out = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__,
           "date": dt.datetime.now(dt.UTC).date().isoformat()}  # fmt: skip
    if device.startswith("cuda"):
        out["name"] = torch.cuda.get_device_name()
        if tool := shutil.which("nvidia-smi"):
            query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
            out["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    else:
        out["name"] = platform.machine()
    return out


@torch.inference_mode()
def ask(model: Any, tok: Any, prompts: list[tasks.Prompt], tokens: int) -> list[tuple[tasks.Prompt, int, str]]:
    """(prompt, prompt tokens, completion) of greedy decoding, batches of at most `tokens` prompt tokens."""
    rows = []
    for p in prompts:
        ids = tok.apply_chat_template(
            hub_messages(p.messages), tools=p.tools or None, add_generation_prompt=True, enable_thinking=p.enable_thinking,
            return_dict=True,
        )["input_ids"]  # fmt: skip
        rows.append((p, ids, len(tok(p.answer.text(), add_special_tokens=False)["input_ids"])))
    rows.sort(key=lambda r: len(r[1]))
    out = []
    while rows:
        n = max(1, min(32, len(rows), tokens // len(rows[0][1])))
        part, rows = rows[:n], rows[n:]
        width = max(len(ids) for _, ids, _ in part)
        batch = torch.tensor([[tok.pad_token_id] * (width - len(ids)) + ids for _, ids, _ in part])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids, _ in part])
        got = model.generate(
            input_ids=batch.to(model.device), attention_mask=mask.to(model.device), do_sample=False, temperature=None,
            top_p=None, top_k=None, max_new_tokens=max(n for _, _, n in part) + 16,
        )  # fmt: skip
        for (p, ids, _), row in zip(part, got[:, width:].tolist(), strict=True):
            end = next((i for i, t in enumerate(row) if t in (2, 24)), len(row))
            out.append((p, len(ids), tok.decode(row[:end])))
    return out


def main() -> int:
    """Run all kinds."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("model", type=Path)
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--count", type=int, default=100)
    ap.add_argument("--kinds", nargs="+", choices=tasks.KINDS, default=tasks.KINDS)
    ap.add_argument("--json", metavar="FILE")
    ap.add_argument("--failures", action="store_true", help="print failed answers to stderr")
    args = ap.parse_args()
    tok = AutoTokenizer.from_pretrained(args.model)
    model = LagunaForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
    kinds = {}
    for kind in args.kinds:
        began = time.monotonic()
        right, longest = 0, 0
        by: dict[str, list[int]] = {"thinking": [], "direct": []}
        for p, n, text in ask(model, tok, tasks.heldout_prompts(kind, args.count), 16384):
            good = tasks.judge(p, *tasks.parse_completion(text, p.enable_thinking, p.tools))
            right, longest = right + good, max(longest, n)
            by["thinking" if p.enable_thinking else "direct"].append(good)
            if args.failures and not good:
                print(kind, n, repr(p.answer.text()), repr(text), file=sys.stderr)
        kinds[kind] = {"prompts": args.count, "passed": right, "longest_prompt": longest,
                       **{k: f"{sum(v)}/{len(v)}" for k, v in by.items()}}  # fmt: skip
        print(f"{kind}: {right}/{args.count} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    body = {
        "format": "bf16, greedy",
        "floor": FLOOR,
        "seed": tasks.HELDOUT_SEED,
        "kinds": kinds,
        "where": where(args.device),
    }
    text = json.dumps(body, indent=2) + "\n"
    if args.json and args.json != "-":
        Path(args.json).write_text(text)
    if args.json == "-":
        sys.stdout.write(text)
    else:
        print("kind         passed  thinking  direct  longest prompt")
        for kind, row in kinds.items():
            print(
                f"{kind:<12} {row['passed']:>3}/{row['prompts']:<3} {row['thinking']:>8} {row['direct']:>7} {row['longest_prompt']:>8}"
            )
    return int(any(row["passed"] < FLOOR * row["prompts"] for row in kinds.values()))


if __name__ == "__main__":
    sys.exit(main())
