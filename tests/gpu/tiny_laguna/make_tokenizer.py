"""Train the byte-level BPE tokenizer of the tiny laguna model and write its files; the same files on every run.

Letters merge with letters only; every digit, space and symbol is a token of its own, so a text has the same tokens in
a prompt, after a quote and in an argument. Usage: make_tokenizer.py OUT
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

from tasks import WORDS, training_conversation
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 1024
EOS = "〈|EOS|〉"
RESERVED = {
    0: "<unk>", 1: "〈|CODE_START|〉", 2: EOS, 3: "〈|CODE_END|〉", 9: "<pad>", 12: "<mask>", 18: "<think>", 19: "</think>",
    23: "<assistant>", 24: "</assistant>", 25: "<tool_call>", 26: "</tool_call>", 27: "<arg_key>", 28: "</arg_key>",
    29: "<arg_value>", 30: "</arg_value>", 31: "<system>", 32: "</system>", 33: "<user>", 34: "</user>",
    35: "<tool_response>", 36: "</tool_response>", 37: "<available_tools>", 38: "</available_tools>",
}  # fmt: skip
PLAIN = [t for i, t in RESERVED.items() if i >= 18 and i != 24]


def build() -> Tokenizer:
    """The trained tokenizer, ids 0 to 38 fixed."""
    tokens = [RESERVED.get(i, f"<|reserved_{i}|>") for i in range(max(RESERVED) + 1)]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    marks = re.compile("|".join(re.escape(t) for t in tokens))
    corpus = [" ".join(WORDS)] * 3 + [
        marks.sub(" ", "".join(text for text, _ in training_conversation(random.Random(f"tokenizer/{i}"), 700, 1)))
        for i in range(1500)
    ]
    tok.train_from_iterator(corpus, trainer)
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens if t not in PLAIN])
    body = json.loads(tok.to_str())
    for row in body["added_tokens"]:
        row["special"] = row["content"] not in PLAIN
    tok = Tokenizer.from_str(json.dumps(body))
    tok.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A", pair=f"{EOS} $A {EOS} $B", special_tokens=[(EOS, 2)]
    )
    for i, t in RESERVED.items():
        assert tok.token_to_id(t) == i, (t, i)
    assert tok.get_vocab_size() == VOCAB
    return tok


def main() -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    build().save(str(out / "tokenizer.json"))
    special = {"bos_token": EOS, "eos_token": EOS, "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "model_max_length": 32768, **special,
    }  # fmt: skip
    for name, body in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (out / name).write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    (out / "chat_template.jinja").write_text(template)


if __name__ == "__main__":
    main()
