"""A small transformer with random weights whose layers keep their past in four ways, and two places to keep it.

    layers.0, layers.4   full        keys and values of every token
    layers.1, layers.5   window      keys and values of the last WINDOW tokens
    layers.2, layers.6   latent      one compressed row per token, from which keys and values follow (MLA)
    layers.3, layers.7   state       a convolution's last inputs and a recurrent state (Mamba)

The model computes one token at a time, always in the same shapes, so that equal caches give equal bits. It knows its
cache by four methods only: `ContiguousCache` is a plain tensor per layer, `PagedCache` is a daemon's memory seen
through block tables. A row goes to the cache and comes back from it before it is used, also within one token.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvhold_client.mapping import MappedRegion

HIDDEN = 32
NUM_HEADS = 2
HEAD_SIZE = 16
LATENT_SIZE = 48
ROTARY_SIZE = 16
WINDOW = 24
CONVOLUTION_WIDTH = 3
STATE_SIZE = 8
VOCABULARY = 128
KINDS = ("full", "window", "latent", "state") * 2
LAYER_NAMES = tuple(f"layers.{index}" for index in range(len(KINDS)))
ROW_SHAPE = {
    "full": (NUM_HEADS, 2 * HEAD_SIZE),
    "window": (NUM_HEADS, 2 * HEAD_SIZE),
    "latent": (1, LATENT_SIZE + ROTARY_SIZE),
}
CONVOLUTION_SHAPE = (CONVOLUTION_WIDTH, HIDDEN)
RECURRENCE_SHAPE = (HIDDEN, STATE_SIZE)


class Cache(Protocol):
    """Where layers keep their past. Rows are bfloat16 [head, content]; states are (bfloat16, float32)."""

    def write_row(self, layer: int, position: int, row: Tensor) -> None: ...

    def rows(self, layer: int, first: int, end: int) -> Tensor:
        """[token, head, content] of positions first..end-1."""

    def write_state(self, layer: int, position: int, convolution: Tensor, recurrence: Tensor) -> None: ...

    def state(self, layer: int, position: int) -> tuple[Tensor, Tensor]:
        """The state after the token at `position`."""


class ContiguousCache:
    """What an engine without kvhold has: the reference."""

    def __init__(self, max_tokens: int) -> None:
        self._rows = {
            layer: torch.zeros(max_tokens, *ROW_SHAPE[kind], dtype=torch.bfloat16)
            for layer, kind in enumerate(KINDS)
            if kind in ROW_SHAPE
        }
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def write_row(self, layer: int, position: int, row: Tensor) -> None:
        self._rows[layer][position] = row

    def rows(self, layer: int, first: int, end: int) -> Tensor:
        return self._rows[layer][first:end]

    def write_state(self, layer: int, position: int, convolution: Tensor, recurrence: Tensor) -> None:
        self._states[layer] = (convolution, recurrence)

    def state(self, layer: int, position: int) -> tuple[Tensor, Tensor]:
        return self._states[layer]


class PagedCache:
    """A daemon's memory: block b of a layer's group holds `block_size_tokens` rows, or the state after its last token.

    `tables` are the sequence's block ids per group. A read-only mapping can still compute the next token: its own rows
    and states are kept aside (`_own`), as a speculative step's would be.
    """

    def __init__(self, region: MappedRegion, tables: list[list[int]], block_size_tokens: int) -> None:
        self._region = region
        self._views = region.views
        self._block_size = block_size_tokens
        self._own_rows: dict[tuple[int, int], Tensor] = {}
        self._own_states: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        group_of: Mapping[str, int] = {name: g for g, names in enumerate(region.layout.groups) for name in names}
        self._groups = [group_of[name] for name in LAYER_NAMES]
        self.tables = tables

    def write_row(self, layer: int, position: int, row: Tensor) -> None:
        if self._region.read_only:
            self._own_rows[layer, position] = row
            return
        block, slot = self._place(layer, position)
        self._view(layer)[block, :, slot] = row

    def rows(self, layer: int, first: int, end: int) -> Tensor:
        stored_end = next((p for p in range(first, end) if (layer, p) in self._own_rows), end)
        first_block = first // self._block_size
        table = self.tables[self._groups[layer]][first_block : -(-stored_end // self._block_size)]
        assert 0 not in table, "the null block is never read"
        pages = self._view(layer)[torch.tensor(table, dtype=torch.int64)]  # [block, head, token, content]
        tokens = pages.transpose(1, 2).reshape(-1, pages.shape[1], pages.shape[3])
        skipped = first_block * self._block_size
        stored = tokens[first - skipped : stored_end - skipped]
        own = [self._own_rows[layer, position] for position in range(stored_end, end)]
        return torch.cat([stored, torch.stack(own)]) if own else stored

    def write_state(self, layer: int, position: int, convolution: Tensor, recurrence: Tensor) -> None:
        if self._region.read_only:
            self._own_states[layer, position] = (convolution, recurrence)
            return
        block, _ = self._place(layer, position)
        views = self._views[LAYER_NAMES[layer]]
        views[0][block], views[1][block] = convolution, recurrence

    def state(self, layer: int, position: int) -> tuple[Tensor, Tensor]:
        if (layer, position) in self._own_states:
            return self._own_states[layer, position]
        block, _ = self._place(layer, position)
        views = self._views[LAYER_NAMES[layer]]
        return views[0][block].clone(), views[1][block].clone()

    def _place(self, layer: int, position: int) -> tuple[int, int]:
        block = self.tables[self._groups[layer]][position // self._block_size]
        assert block, "the null block is never written"
        return block, position % self._block_size

    def _view(self, layer: int) -> Tensor:
        view: Tensor = self._views[LAYER_NAMES[layer]]
        return view


class TinyModel:
    """Weights follow from the seed: every process has the same model."""

    def __init__(self, seed: int = 0) -> None:
        torch.set_num_threads(1)  # one order of additions
        self._random = torch.Generator().manual_seed(seed)
        self.embedding = self._weight(VOCABULARY, HIDDEN, scale=1.0)
        self.layers = [{name: self._weight(*shape) for name, shape in _SHAPES[kind].items()} for kind in KINDS]
        self.mlps = [(self._weight(4 * HIDDEN, HIDDEN), self._weight(HIDDEN, 4 * HIDDEN)) for _ in KINDS]

    def forward(self, token: int, position: int, cache: Cache) -> Tensor:
        """Logits after this token; its rows and states are in the cache then."""
        x = self.embedding[token] + _position_code(position)
        for layer, kind in enumerate(KINDS):
            x = x + _MIXERS[kind](self.layers[layer], _normed(x), layer, position, cache)
            into, out = self.mlps[layer]
            x = x + out @ functional.gelu(into @ _normed(x))
        return self.embedding @ _normed(x)

    def _weight(self, *shape: int, scale: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=self._random) * (scale or shape[-1] ** -0.5)


_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "full": {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)},
    "window": {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)},
    "latent": {
        "q": (NUM_HEADS * (LATENT_SIZE + ROTARY_SIZE), HIDDEN),
        "row": (LATENT_SIZE + ROTARY_SIZE, HIDDEN),
        "o": (HIDDEN, NUM_HEADS * LATENT_SIZE),
    },
    "state": {
        "in": (HIDDEN, HIDDEN), "conv": (CONVOLUTION_WIDTH + 1, HIDDEN), "decay": (HIDDEN, HIDDEN),
        "b": (STATE_SIZE, HIDDEN), "c": (STATE_SIZE, HIDDEN), "o": (HIDDEN, HIDDEN),
    },
}  # fmt: skip


def _attention(weights: dict[str, Tensor], x: Tensor, layer: int, position: int, cache: Cache, first: int) -> Tensor:
    key, value = (weights[name] @ x for name in "kv")
    row = torch.cat([key.view(NUM_HEADS, HEAD_SIZE), value.view(NUM_HEADS, HEAD_SIZE)], dim=1)
    cache.write_row(layer, position, row.to(torch.bfloat16))
    rows = cache.rows(layer, first, position + 1).float().contiguous()
    query = (weights["q"] @ x).view(NUM_HEADS, HEAD_SIZE)
    scores = torch.einsum("hc,thc->ht", query, rows[..., :HEAD_SIZE]) * HEAD_SIZE**-0.5
    mixed = torch.einsum("ht,thc->hc", scores.softmax(dim=1), rows[..., HEAD_SIZE:])
    return weights["o"] @ mixed.reshape(-1)


def _full(weights: dict[str, Tensor], x: Tensor, layer: int, position: int, cache: Cache) -> Tensor:
    return _attention(weights, x, layer, position, cache, first=0)


def _window(weights: dict[str, Tensor], x: Tensor, layer: int, position: int, cache: Cache) -> Tensor:
    return _attention(weights, x, layer, position, cache, first=max(0, position + 1 - WINDOW))


def _latent(weights: dict[str, Tensor], x: Tensor, layer: int, position: int, cache: Cache) -> Tensor:
    cache.write_row(layer, position, (weights["row"] @ x).to(torch.bfloat16).view(1, -1))
    rows = cache.rows(layer, 0, position + 1).float()[:, 0].contiguous()
    query = (weights["q"] @ x).view(NUM_HEADS, LATENT_SIZE + ROTARY_SIZE)
    scores = torch.einsum("hc,tc->ht", query, rows) * (LATENT_SIZE + ROTARY_SIZE) ** -0.5
    mixed = torch.einsum("ht,tc->hc", scores.softmax(dim=1), rows[:, :LATENT_SIZE])
    return weights["o"] @ mixed.reshape(-1)


def _state(weights: dict[str, Tensor], x: Tensor, layer: int, position: int, cache: Cache) -> Tensor:
    past = torch.zeros(CONVOLUTION_SHAPE, dtype=torch.bfloat16)
    recurrence = torch.zeros(RECURRENCE_SHAPE)
    if position:
        past, recurrence = cache.state(layer, position - 1)
    inputs = torch.cat([past, (weights["in"] @ x).to(torch.bfloat16)[None]])
    u = functional.silu((inputs.float() * weights["conv"]).sum(dim=0))
    decay = torch.sigmoid(weights["decay"] @ x)
    recurrence = recurrence * decay[:, None] + torch.outer(u, weights["b"] @ x)
    cache.write_state(layer, position, inputs[1:], recurrence)
    return weights["o"] @ (recurrence @ (weights["c"] @ x))


_MIXERS = {"full": _full, "window": _window, "latent": _latent, "state": _state}


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean() + 1e-6)


def _position_code(position: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(HIDDEN // 2) / (HIDDEN // 2))
    angles = position * frequencies
    return torch.cat([angles.sin(), angles.cos()]) * 0.3
