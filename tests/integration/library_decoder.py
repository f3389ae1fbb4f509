"""A decoder of 260,000 parameters that has read the library's documents, and its tokenizer.

Both are made here, from ``pydoc_data.topics`` and functions of the standard library: a byte-level
vocabulary of 512 pieces, and a Llama of five layers trained for a moment. So there is text that
the model knows (topics, "near") and text that it has hardly seen (functions, "far") on every
machine. Made once for each Python and torch version, into the git-ignored folder of models.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alphatoken.data.stdlib import code_rows, text_rows
from tests.places import models_folder

_STEPS = 500
_BATCH, _LENGTH = 6, 96
_ROWS = 700
"""Paragraphs of topics: nearly all that there are."""


def decoder_folder() -> Path:
    """The folder of the trained decoder, trained at the first call."""
    root = models_folder()
    source = (
        Path(__file__).read_bytes() + f"{platform.python_version()} {torch.__version__}".encode()
    )
    target = root / f"library-260k-{hashlib.sha256(source).hexdigest()[:12]}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".library-decoder.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test process trains, the others wait
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=".training-", dir=root) as name:
                made = Path(name, "model")
                tokenizer = make_tokenizer()
                make_decoder(tokenizer, _STEPS).save_pretrained(made)
                tokenizer.save_pretrained(made)
                made.rename(target)
    return target


def _texts() -> list[str]:
    return [row.response for row in text_rows(_ROWS)]


def make_tokenizer() -> Any:
    """A byte-level vocabulary of 512 pieces, of which any text can be made and read back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_texts(), trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def make_decoder(tokenizer: Any, steps: int) -> Any:
    """A Llama trained for ``steps`` on windows of the topics, one in six on functions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    model.train()
    for batch in _windows(tokenizer, steps):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def _windows(tokenizer: Any, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    near = _stream(tokenizer, _texts())
    far = _stream(tokenizer, [f"{row.prompt}\n{row.response}" for row in code_rows(200, seed=1)])
    span = torch.arange(_LENGTH)
    for _ in range(steps):
        starts = torch.randint(len(near) - _LENGTH, (_BATCH - 1, 1), generator=generator)
        one = torch.randint(len(far) - _LENGTH, (1, 1), generator=generator)
        yield torch.cat([near[starts + span], far[one + span]])


def _stream(tokenizer: Any, texts: list[str]) -> Tensor:
    rows = tokenizer(texts)["input_ids"]
    return torch.tensor([token for row in rows for token in [*row, tokenizer.eos_token_id]])
