"""One query over a few paged tiles: the running state as a table and as a picture."""

from __future__ import annotations

import dataclasses

import torch

from torch_pagedkv.cache.argument_checks import check_integer
from torch_pagedkv.inspect.online_softmax import SoftmaxState, trace_softmax

_OWNER = "softmax"
_HEAD_DIM, _BLOCK_SIZE = 32, 8


@dataclasses.dataclass(frozen=True)
class SoftmaxExample:
    """One head's random query over a sequence of random keys in blocks of random order.

    Attributes:
        scores: [num_tokens] the score of each key, in float64.
        states: the running state after each tile.
        out, lse: the dense softmax over all keys, in float64.
    """

    tile: int
    scores: torch.Tensor
    states: list[SoftmaxState]
    out: torch.Tensor
    lse: float

    @property
    def distances(self) -> list[float]:
        """Largest difference of each state's output from the dense one."""
        return [float((state.out[0, 0].double() - self.out).abs().max()) for state in self.states]

    def __str__(self) -> str:
        num_tokens = len(self.scores)
        lines = [
            f"{num_tokens} keys in {len(self.states)} tiles of {self.tile}, one query",
            f"{'tile':>4}  {'keys':12}{'maximum':>9}{'decay':>9}{'denominator':>13}{'lse so far':>12}"
            f"{'out, off by':>13}",
        ]
        before = -torch.inf
        for index, (state, distance) in enumerate(zip(self.states, self.distances, strict=True)):
            first, last = index * self.tile, min((index + 1) * self.tile, num_tokens) - 1
            maximum = state.maximum.item()
            decay = torch.exp(torch.tensor(before - maximum)).item()  # of all that was summed before
            lines.append(
                f"{index:4}  {f'{first} to {last}':12}{maximum:9.4f}{decay:9.4f}{state.denominator.item():13.4f}"
                f"{state.lse.item():12.4f}{distance:13.4f}"
            )
            before = maximum
        agrees = self.distances[-1] < 1e-5 and abs(self.states[-1].lse.item() - self.lse) < 1e-5
        verdict = "the last state equals it" if agrees else "THE LAST STATE DIFFERS"
        lines.append(f"dense softmax in float64: lse {self.lse:.4f}; {verdict} to within 1e-5")
        return "\n".join(lines)


def make_softmax_example(num_tokens: int = 96, tile: int = 16, seed: int = 0) -> SoftmaxExample:
    """Build the example on CPU; the same numbers give the same example."""
    num_tokens = check_integer(_OWNER, "num_tokens", num_tokens, 1, 4096)
    tile = check_integer(_OWNER, "tile", tile, 1, 1024)
    seed = check_integer(_OWNER, "seed", seed, 0, 2**63 - 1)
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    table = torch.randperm(num_blocks, generator=generator, device="cpu")[None]
    key_cache, value_cache = (normal(num_blocks, _BLOCK_SIZE, 1, _HEAD_DIM) for _ in range(2))
    query = 2 * normal(1, 1, _HEAD_DIM)
    length = torch.tensor([num_tokens], device="cpu")
    states = trace_softmax(query, key_cache, value_cache, table, length, tile=tile)
    keys, values = (pool[table[0]].flatten(0, 1)[:num_tokens, 0].double() for pool in (key_cache, value_cache))
    scores = keys @ query[0, 0].double() * _HEAD_DIM**-0.5
    return SoftmaxExample(tile, scores, states, scores.softmax(0) @ values, scores.logsumexp(0).item())


def plot_softmax(example: SoftmaxExample, path: str) -> None:
    """Draw how the state converges, tile by tile, into a file of any kind that matplotlib writes."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotImplementedError(
            f"{_OWNER}: plot must be left out where matplotlib cannot be imported, got {path!r}; "
            f"installing matplotlib draws it ({error})"
        ) from error
    states, tile = example.states, example.tile
    ends = [min((i + 1) * tile, len(example.scores)) for i in range(len(states))]
    figure = Figure(figsize=(7, 8), layout="constrained")
    FigureCanvasAgg(figure)
    scores, sums, errors = figure.subplots(3, 1, sharex=True)
    scores.plot(example.scores, ".", color="0.6", label="score of each key")
    scores.step([0, *ends], [states[0].maximum.item(), *(s.maximum.item() for s in states)], label="running maximum")
    scores.plot(ends, [s.lse.item() for s in states], "o-", label="lse so far")
    scores.axhline(example.lse, color="k", linestyle=":", label="lse of all keys")
    sums.plot(ends, [s.denominator.item() for s in states], "o-", label="denominator")
    norms = [s.accumulator.norm().item() for s in states]
    sums.plot(ends, norms, "s-", label="length of the accumulator")
    errors.semilogy(ends, [max(d, 1e-9) for d in example.distances], "o-", label="out so far, largest difference")
    errors.set(xlabel=f"keys seen, in tiles of {tile}")
    for axis in (scores, sums, errors):
        axis.legend(fontsize=8, loc="lower right")
        for end in ends:
            axis.axvline(end, color="0.9", zorder=0)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_OWNER}: plot must name a file that can be drawn, got {path!r} ({error})") from error
