"""How rows are cut into microbatches, so that little of their passes is padding or computed twice."""

from collections.abc import Hashable, Sequence

_SHORTER, _LEAST = 0.75, 4

PASS_POSITIONS = {"cuda": 300}
"""Positions that a pass takes as long as at least, by the type of the device: those that are computed while the weights
are read. An H100 computes 989 TFLOP/s in bf16 and reads 3.35 TB/s; a CPU's passes over few positions are not slower."""


def by_length(lengths: Sequence[int], size: int, shared: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Group positions of similar length into microbatches of at most `size`.

    Of one length, those with equal `shared` are neighbours, so that few passes are made of a microbatch.
    """
    first = dict[Hashable, int]()
    places = [0 if shared is None else first.setdefault(shared[row], row) for row in range(len(lengths))]
    # Stable: rows that are alike keep their order in the minibatch.
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], places[row]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def similar_lengths(lengths: Sequence[int], pass_positions: int = 0) -> list[list[int]]:
    """Cut rows, the longest first, where one is a quarter shorter than the first of its part; four or more a part.

    A cut that leaves out less padding than a pass costs is not made.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts: list[list[int]] = [[]]
    for place, row in enumerate(order):
        part = parts[-1]
        left, first = len(order) - place, lengths[part[0]] if part else 0
        pays = left * (first - lengths[row]) > pass_positions
        if len(part) >= _LEAST and left >= _LEAST and lengths[row] < _SHORTER * first and pays:
            parts.append([])
        parts[-1].append(row)
    return parts


def sharing_prompts(
    lengths: Sequence[int],
    prompts: Sequence[Hashable],
    prompt_lengths: Sequence[int],
    size: int,
    pass_positions: int = 0,
) -> list[list[int]]:
    """Group completions into microbatches of at most `size`, by length or by prompt: as computes fewer positions.

    By length it is what `by_length` gives, so never more is computed than for whole rows.

    Args:
        lengths: of the completions.
        prompts: equal for those that share a prompt.
        prompt_lengths: ids of the prompt of each.
        pass_positions: that a pass takes as long as at least.
    """

    def computed(plan: list[list[int]]) -> int:
        total = 0
        for part in plan:
            own, longest = [lengths[row] for row in part], max(prompt_lengths[row] for row in part)
            total += min(computed_positions(own, len({prompts[row] for row in part}), longest, pass_positions))
        return total

    return min(by_length(lengths, size), _by_prompt(lengths, prompts, size), key=computed)


def _by_prompt(lengths: Sequence[int], prompts: Sequence[Hashable], size: int) -> list[list[int]]:
    """Keep the rows of a prompt together, the longest first; more than `size` are cut by length."""
    groups = dict[Hashable, list[int]]()
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        groups.setdefault(prompts[row], []).append(row)
    pieces = [rows[start : start + size] for rows in groups.values() for start in range(0, len(rows), size)]
    plan: list[list[int]] = []
    for piece in sorted(pieces, key=lambda rows: -lengths[rows[0]]):
        if not plan or len(plan[-1]) + len(piece) > size:
            plan.append([])
        plan[-1] += piece
    return plan


def computed_positions(
    lengths: Sequence[int], prompts: int, longest_prompt: int, pass_positions: int
) -> tuple[int, int]:
    """Count what the passes of a microbatch compute: over whole rows, and where its few distinct prompts are shared.

    Padding counts, and the last token of a row is not read.
    """

    def of_pass(rows: int, positions: int) -> int:
        return max(rows * positions, pass_positions) if positions else 0

    parts = similar_lengths(lengths, pass_positions)
    shared = of_pass(prompts, longest_prompt) + sum(of_pass(len(part), lengths[part[0]] - 1) for part in parts)
    return of_pass(len(lengths), longest_prompt + max(lengths) - 1), shared
