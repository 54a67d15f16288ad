"""Train the tiny laguna model from scratch by seed and export it in the published layout.

Batches are a pure function of (seed, step) and are made by worker processes; only answer tokens carry loss; the router
bias is trained by sign updates of the load. Usage: train.py --tokenizer DIR --out DIR [--device cuda|cpu] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tasks
import torch
import torch.nn.functional as F
from model import TinyLaguna, export
from tokenizers import Tokenizer
from torch import Tensor

PAD, END = 9, 24
STAGES = (0.08, 0.3)  # ends of the stages "short copies" and "all kinds, short", as parts of all steps


@dataclass(frozen=True)
class Plan:
    """What the batches depend on."""

    tokenizer: str
    seed: int
    steps: int
    tokens: int
    longest: int


@dataclass(frozen=True)
class Batch:
    """ids [B, L] int16; flat positions, targets and weights of the answer tokens."""

    ids: np.ndarray
    at: np.ndarray
    target: np.ndarray
    weight: np.ndarray


def encode(tok: Tokenizer, segments: list[tuple[str, bool]]) -> tuple[list[int], list[float]]:
    """Token ids and loss weights; an answer of n tokens weighs sqrt(n) in all."""
    ids: list[int] = []
    weights: list[float] = []
    for row, (_, answer) in zip(
        tok.encode_batch([s for s, _ in segments], add_special_tokens=False), segments, strict=True
    ):
        ids += row.ids
        weights += [len(row.ids) ** -0.5 if answer else 0.0] * len(row.ids)
    return ids, weights


def make_batch(plan: Plan, tok: Tokenizer, step: int) -> Batch:
    """The batch of one step."""
    rng = random.Random(f"{plan.seed}/{step}")
    part = step / plan.steps
    stage = 0 if part < STAGES[0] else 1 if part < STAGES[1] else 2
    lengths = ((512,), (512, 512, 1024, 1536), (512, 512, 1024, 1024, 2048, 4096, plan.longest, plan.longest))[stage]
    length = min(rng.choice(lengths), plan.longest)
    budget = plan.tokens // 2 if stage == 0 else plan.tokens
    rows = max(1, budget // length)
    ids = np.full((rows, length), PAD, np.int16)
    weight = np.zeros((rows, length), np.float32)
    for i in range(rows):
        row, w = encode(tok, tasks.training_conversation(rng, int(length * (1.15 if length < 2048 else 1.0)), stage))
        n = min(length, len(row))
        ids[i, :n], weight[i, :n] = row[:n], w[:n]
    flat = weight[:, 1:].nonzero()
    at = (flat[0] * length + flat[1]).astype(np.int32)
    return Batch(ids, at, ids[:, 1:][flat].astype(np.int16), weight[:, 1:][flat])


def _worker(plan: Plan, first: int, stride: int, start: int, queue: mp.Queue[Batch]) -> None:
    torch.set_num_threads(1)
    tok = Tokenizer.from_file(plan.tokenizer)
    for step in range(start + first, plan.steps, stride):
        queue.put(make_batch(plan, tok, step))


def batches(plan: Plan, start: int, workers: int) -> Iterator[Batch]:
    """Batches in step order, made by `workers` processes (0: in this process)."""
    if workers == 0:
        tok = Tokenizer.from_file(plan.tokenizer)
        for step in range(start, plan.steps):
            yield make_batch(plan, tok, step)
        return
    context = mp.get_context("spawn")
    queues: list[Any] = [context.Queue(6) for _ in range(workers)]
    for i, queue in enumerate(queues):
        context.Process(target=_worker, args=(plan, i, workers, start, queue), daemon=True).start()
    for step in range(plan.steps - start):
        yield queues[step % workers].get()


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates (Newton-Schulz), matrices of one shape together; experts as [E, rows, cols]."""

    def __init__(self, params: list[tuple[Tensor, int]], lr: float) -> None:
        super().__init__([p for p, _ in params], {"lr": lr, "momentum": 0.95, "decay": 0.02})
        self.split = {id(p): n for p, n in params}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor, bool]]] = {}
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["m"] = torch.zeros_like(p)
            state["m"].lerp_(p.grad, 1 - group["momentum"])
            update = p.grad.lerp(state["m"], group["momentum"])
            update = update if p.dim() == 3 else update.view(self.split[id(p)], -1, p.shape[-1])
            tall = update.shape[1] > update.shape[2]
            update = update.transpose(1, 2) if tall else update
            shapes.setdefault((update.shape[1], update.shape[2]), []).append((p, update, tall))
        for rows in shapes.values():
            x = torch.cat([u for _, u, _ in rows]).bfloat16()
            x = x / (x.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
            for _ in range(5):
                a = x @ x.transpose(1, 2)
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            at = 0
            for p, u, tall in rows:
                y = x[at : at + len(u)]
                at += len(u)
                y = y.transpose(1, 2) if tall else y
                scale = max(1.0, y.shape[1] / y.shape[2]) ** 0.5
                p.mul_(1 - group["lr"] * group["decay"]).add_(
                    y.reshape(p.shape).to(p.dtype), alpha=-group["lr"] * scale
                )


def optimizers(model: TinyLaguna, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings, head, gates and norms."""
    hidden, other = [], []
    for name, p in model.named_parameters():
        if p.dim() < 2 or name.startswith(("embed", "lm_head")) or name.endswith(("g_proj.weight", "mlp.gate.weight")):
            other.append(p)
        else:
            split = model.config["num_experts"] if name.endswith(("mlp.gate_proj", "mlp.up_proj")) else 1
            hidden.append((p, split))
    adam = torch.optim.AdamW(other, lr=lr * 0.15, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(hidden, lr), adam]


def heldout_rows(tok: Tokenizer, count: int, longest: int) -> dict[str, list[tuple[list[int], int]]]:
    """Per kind: (ids of prompt and answer, length of the prompt)."""
    out = {}
    for kind in tasks.KINDS:
        rows = []
        for p in tasks.heldout_prompts(kind, count, longest=min(longest, 8192)):
            head = tok.encode(tasks.prompt_text(p), add_special_tokens=False).ids
            rows.append((head + tok.encode(p.answer.text(), add_special_tokens=False).ids + [END], len(head)))
        out[kind] = sorted(rows, key=lambda r: len(r[0]))
    return out


@torch.no_grad()
def accuracy(
    model: TinyLaguna, rows: list[tuple[list[int], int]], dtype: torch.dtype, device: str, tokens: int
) -> float:
    """Part of the answers whose every token is the argmax, which is what greedy decoding would write."""
    right = i = 0
    while i < len(rows):
        n = max(1, min(len(rows) - i, tokens // len(rows[min(len(rows) - 1, i + 16)][0])))
        part = rows[i : i + n]
        i += n
        ids = torch.full((len(part), len(part[-1][0])), PAD)
        for j, (row, _) in enumerate(part):
            ids[j, : len(row)] = torch.tensor(row)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            hidden = model(ids.to(device), dtype)
            for j, (row, head) in enumerate(part):
                best = model.head(hidden[j, head - 1 : len(row) - 1]).argmax(-1)
                right += int(best.tolist() == row[head:])
    return right / len(rows)


def main() -> None:
    """Train, log one JSON line per report, export."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--steps", type=int, default=5000)
    ap.add_argument("--tokens", type=int, default=65536, help="tokens per step (half in the first stage)")
    ap.add_argument("--longest", type=int, default=8704)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--bias-rate", type=float, default=0.002)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--workers", type=int, default=14)
    ap.add_argument("--report", type=int, default=500, help="steps between held-out reports")
    ap.add_argument("--max-seconds", type=float, default=math.inf, help="the schedule shrinks to end in time")
    ap.add_argument("--state", type=Path, help="where to keep the resumable state")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    began = time.monotonic()
    torch.manual_seed(args.seed)
    cuda = args.device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    plan = Plan(str(args.tokenizer / "tokenizer.json"), args.seed, args.steps, args.tokens, args.longest)
    model = TinyLaguna()
    start = 0
    model.to(args.device)
    opts = optimizers(model, args.lr)
    if args.resume:
        kept = torch.load(args.state, map_location=args.device)
        model.load_state_dict(kept["model"])
        for opt, state in zip(opts, kept["opts"], strict=True):
            opt.load_state_dict(state)
        start = kept["step"]
    source = batches(plan, start, args.workers)
    heldout = heldout_rows(Tokenizer.from_file(plan.tokenizer), 100 if cuda else 8, args.longest)
    base = [args.lr, args.lr * 0.15]
    loss_sum, seen, step, waited = torch.zeros((), device=args.device), 0, start, 0.0

    def report(final: bool) -> None:
        model.eval()
        scores = {k: round(accuracy(model, rows, dtype, args.device, args.tokens), 3) for k, rows in heldout.items()}
        model.train()
        line = {
            "step": step, "seconds": round(time.monotonic() - began, 1), "tokens": seen, "wait": round(waited, 1),
            "bias": [round(float(m.bias.abs().max()), 3) for m in model.moes()],
            "load": [round(float(m.load.max() / m.load.mean().clamp(min=1e-9)), 2) for m in model.moes()], **scores, "final": final,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        export(model, args.out)

    for batch in source:
        begin = time.monotonic()
        part = max(step / args.steps, (begin - began) / args.max_seconds)
        if part >= 1:
            break
        rate = min(1.0, (step + 1) / 100) * min(1.0, (1 - part) / 0.45)
        for opt, lr in zip(opts, base, strict=True):
            opt.param_groups[0]["lr"] = lr * rate
        ids = torch.from_numpy(batch.ids).to(args.device, non_blocking=True).long()
        at, target, weight = (
            torch.from_numpy(x).to(args.device, non_blocking=True) for x in (batch.at, batch.target, batch.weight)
        )
        with torch.autocast("cuda" if cuda else "cpu", dtype, enabled=cuda):
            hidden = model(ids, dtype, count=True).flatten(0, 1)[at.long()]
            logits = model.head(hidden).float()
        losses = F.cross_entropy(logits, target.long(), reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        for opt in opts:
            opt.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
        step += 1
        seen += ids.numel()
        loss_sum += loss.detach()
        if step % args.report == 0:
            report(final=False)
        for moe in model.moes():
            moe.balance(args.bias_rate if part < 0.85 else 0.0)
        every = max(1, args.report // 10)
        if step % every == 0:
            line = {
                "step": step,
                "loss": round(float(loss_sum) / every, 4),
                "seconds": round(time.monotonic() - began, 1),
                "seen": seen,
            }
            print(json.dumps(line), flush=True)
            loss_sum.zero_()
        if args.state and step % 1000 == 0:
            torch.save({"model": model.state_dict(), "opts": [o.state_dict() for o in opts], "step": step}, args.state)
    report(final=True)
    if args.state:
        torch.save({"model": model.state_dict(), "opts": [o.state_dict() for o in opts], "step": step}, args.state)


if __name__ == "__main__":
    main()
