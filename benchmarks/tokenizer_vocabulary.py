"""Which vocabulary suits a small model: bytes per token, whole words, unigram and trained bits per byte.

    python benchmarks/tokenizer_vocabulary.py               # a minute on one core
    python benchmarks/tokenizer_vocabulary.py --steps 300   # ten minutes: also trains a plain transformer at each size

All numbers are for the validation text. `words` is the share of tokens that are one whole word of letters. `unigram` is the bits
per byte of a model that knows token frequencies alone. `trained` is the bits per byte of four layers of width 96 after `--steps`
steps of 16 x 128 tokens, and selects the vocabulary. A larger vocabulary shows a model more text per step, and costs 2 x 96
parameters per entry. The layers have 4 x 12 x 96^2 = 442,368 parameters. With 1,024 entries the embeddings are under a third of
the model, and with the next size they are over it. Python 3.11.7, --steps 300, one seed:

     vocab   2*V*96   B/tok prose  B/tok python  words  unigram  trained  fit s
       258    49536          1.00          1.00  0.000    4.633    3.518   0.86
       384    73728          1.62          1.89  0.049    3.954    2.897   0.88
       512    98304          1.88          2.13  0.071    3.744    2.765   0.97
       768   147456          2.23          2.44  0.109    3.494    2.651   1.07
      1024   196608          2.45          2.63  0.140    3.345    2.613   1.01
      1536   294912          2.76          2.88  0.185    3.161    2.546   0.97
      2048   393216          2.96          3.06  0.222    3.034    2.517   0.98
      4096   786432          3.42          3.43  0.305    2.793    2.374   1.05
"""

from __future__ import annotations

import argparse
import math
import re
import time

import numpy as np
import torch
from torch import nn

from workbench.data.corpus import SPLITS, embedded
from workbench.data.tokenizer import TokenDocuments, Tokenizer, tokenize, train_tokenizer

SIZES = (258, 384, 512, 768, 1024, 1536, 2048, 4096)
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 96, 4, 4, 128, 16
WHOLE = re.compile(r"·?[A-Za-z]{2,}")
NEXT = re.compile(r"[A-Za-z]")


def whole_words(stream: TokenDocuments, tokenizer: Tokenizer) -> float:
    """Share of tokens which are a word, neither begun by the token before nor continued by the one after."""
    names = tokenizer.token_strings(stream.ids)
    whole = [
        bool(WHOLE.fullmatch(token)) and not NEXT.match(after) and (token.startswith("·") or not before[-1:].isalpha())
        for before, token, after in zip(["", *names], names, [*names[1:], ""], strict=False)
    ]
    return float(np.mean(whole))


def unigram_bits(train: TokenDocuments, validation: TokenDocuments, vocab_size: int) -> float:
    """Bits per token of the train side's frequencies, plus one count each."""
    counts = np.bincount(train.ids, minlength=vocab_size) + 1
    return float(-np.log2(counts / counts.sum())[validation.ids].mean())


class Plain(nn.Module):
    """A pre-norm transformer with learned positions and untied embeddings."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab_size, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.unembed = nn.Linear(WIDTH, vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        stream = self.embed(ids) + self.place.weight[: ids.shape[1]]
        return self.unembed(self.layers(stream, mask=mask, is_causal=True))


def loss(model: Plain, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained_bits(train: TokenDocuments, validation: TokenDocuments, vocab_size: int, steps: int, seed: int) -> float:
    """Bits per token of a small model after `steps` steps, warm-up over a tenth, cosine decay to zero."""
    torch.manual_seed(seed)
    model, chunks = Plain(vocab_size), train.chunks(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    order = np.random.default_rng(seed).permutation(len(chunks))
    for step in range(steps):
        rate = min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        rows = order[np.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        optimizer.zero_grad()
        loss(model, torch.from_numpy(chunks[rows].astype(np.int64))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    held_out = torch.from_numpy(validation.chunks(LENGTH).astype(np.int64))
    with torch.no_grad():
        return float(np.average([float(loss(model, part)) for part in held_out.split(64)])) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="train a small model for this many steps (0: do not)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    corpus = embedded()
    texts = [document.text for document in corpus.split("train")]
    total = sum(len(document.text.encode()) for document in corpus.split("validation"))
    domains = "".join(f" {'B/tok ' + domain:>13}" for domain in corpus.domains)
    print(f"{'vocab':>6} {'2*V*96':>8}{domains} {'words':>6} {'unigram':>8} {'trained':>8} {'fit s':>6}")
    for size in SIZES:
        start = time.process_time()
        tokenizer = train_tokenizer(texts, size)
        seconds = time.process_time() - start
        train, validation = (tokenize(corpus, tokenizer, split) for split in SPLITS)
        lengths, width = np.diff(validation.starts), total / len(validation.ids)
        ratios = ""
        for domain in corpus.domains:
            bytes_ = sum(len(d.text.encode()) for d in corpus.split("validation") if d.domain == domain)
            ratios += f" {bytes_ / lengths[np.array(validation.domains) == domain].sum():13.2f}"
        trained = (
            trained_bits(train, validation, size, options.steps, options.seed) / width if options.steps else np.nan
        )
        print(
            f"{size:6} {2 * size * WIDTH:8}{ratios} {whole_words(validation, tokenizer):6.3f} "
            f"{unigram_bits(train, validation, size) / width:8.3f} {trained:8.3f} {seconds:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
