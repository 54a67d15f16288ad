"""The generators are stable, the splits disjoint, the template and the compact model equal what serves them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "fixtures" / "tiny-laguna"
sys.path.insert(0, str(HERE))

import tasks


def test_prompts_are_stable_and_held_out() -> None:
    for kind in tasks.KINDS:
        once, again = (tasks.heldout_prompts(kind, 4) for _ in range(2))
        assert once == again
    for prompt in tasks.heldout_prompts("echo", 20):
        assert tasks.split_of(prompt.value) == "heldout"
    maker = tasks.Maker(random.Random(1), "train")
    assert all(tasks.split_of(maker.payload()) == "train" for _ in range(50))


def test_expected_answers_pass_their_own_judge() -> None:
    for kind in tasks.KINDS:
        for p in tasks.heldout_prompts(kind, 10, longest=400):
            assert tasks.judge(p, *tasks.parse_completion(p.answer.text(), p.enable_thinking, p.tools))
            assert not tasks.judge(p, "", "", [])


def test_renderer_equals_chat_template() -> None:
    transformers = pytest.importorskip("transformers")
    from heldout import hub_messages

    tok = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for kind in tasks.KINDS:
        for p in tasks.heldout_prompts(kind, 6, longest=400):
            text = tok.apply_chat_template(
                hub_messages(p.messages), tools=p.tools or None, add_generation_prompt=True, tokenize=False,
                enable_thinking=p.enable_thinking,
            )  # fmt: skip
            assert text == tasks.prompt_text(p)


def test_compact_model_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from model import load

    ours = load(FOLDER)
    theirs = transformers.LagunaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ids = torch.randint(39, 1024, (1, 1300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = ours.head(ours(ids)), theirs(ids).logits
    assert (a - b).abs().max() < 1e-3 * b.abs().max()


def test_folder_is_small_and_names_are_published() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 20_000_000
    names = json.loads((FOLDER / "model.safetensors.index.json").read_text())["weight_map"]
    for name in (
        "mlp.experts.7.down_proj.weight",
        "mlp.experts.e_score_correction_bias",
        "mlp.shared_expert.up_proj.weight",
    ):
        assert f"model.layers.3.{name}" in names
