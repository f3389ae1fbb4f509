"""Small tokenizers of every kind that language models have, trained on a few lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordLevelTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Name a bird. A wren, or an owl.", "Yes No yes no", "2 + 2? 4", "Say bye. Bye.\n",
    "The sun warms the sea,\nand the wind carries the water.", "def f(x):\n    return x\n",
    "\u00e9 \u00fc \U0001f44b \u00f1", "user assistant system",
] * 10  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentencepiece(kind: str) -> Tokenizer:
    """As Llama's and Mistral's: a space before each text ("legacy"), or before the first word."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "legacy":
        space = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        core.normalizer = normalizers.Sequence(space)
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    own = {"special_tokens": [*SPECIAL, *_BYTES], "max_token_length": 6}
    core.train_from_iterator(TEXTS, BpeTrainer(vocab_size=420, **own))
    text = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    return core


def _bytes(**how: bool) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **how})
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {"special_tokens": SPECIAL, "initial_alphabet": alphabet}
    core.train_from_iterator(TEXTS, BpeTrainer(vocab_size=360, **own))
    return core


def _unigram(scheme: str, normalizer: Any = None) -> Tokenizer:
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if normalizer is not None:
        core.normalizer = normalizer
    own = {"special_tokens": SPECIAL, "unk_token": "<unk>"}
    core.train_from_iterator(TEXTS, UnigramTrainer(vocab_size=120, **own))
    return core


def _wordpiece() -> Tokenizer:
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    core.train_from_iterator(TEXTS, WordPieceTrainer(vocab_size=160, special_tokens=SPECIAL))
    return core


def _words() -> Tokenizer:
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.train_from_iterator(TEXTS[:5], WordLevelTrainer(special_tokens=SPECIAL))
    return core


def _characters() -> Tokenizer:
    core = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    lower = [normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()]
    core.normalizer = normalizers.Sequence(lower)
    core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    own = {"special_tokens": SPECIAL, "end_of_word_suffix": "</w>"}
    core.train_from_iterator(TEXTS, BpeTrainer(vocab_size=160, **own))
    return core


def _collapsing() -> Tokenizer:
    collapse = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    return _unigram("always", normalizers.Sequence(collapse))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "sentencepiece, legacy": lambda: _sentencepiece("legacy"),
    "sentencepiece, first": lambda: _sentencepiece("first"),
    "sentencepiece, always": lambda: _sentencepiece("always"),
    "sentencepiece, never": lambda: _sentencepiece("never"),
    "bytes": _bytes,
    "bytes, space before": lambda: _bytes(add_prefix_space=True),
    "bytes, over spaces": lambda: _bytes(use_regex=False),
    "unigram, always": lambda: _unigram("always"),
    "unigram, first": lambda: _unigram("first"),
    "unigram, collapsing": _collapsing,
    "wordpiece": _wordpiece,
    "words": _words,
    "characters, lower": _characters,
}


@cache
def _core(kind: str) -> str:
    return KINDS[kind]().to_str()


def kind_of_tokenizer(kind: str, template: str | None = None, around: str = "<s> $A") -> Any:
    """A tokenizer of this kind, which puts ``around`` around a text ("$A": nothing)."""
    core = Tokenizer.from_str(_core(kind))
    added = [(token, core.token_to_id(token)) for token in SPECIAL[1:3]]
    core.post_processor = processors.TemplateProcessing(single=around, special_tokens=added)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="</s>", additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer
