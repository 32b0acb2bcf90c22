"""Every attack, and the rewards without one.

`python -m tests.attacks.listing` prints a table of what each attack reaches, and fails where it is more than it may.
"""

import sys
from collections.abc import Mapping

from tests.attacks.attacks import Attack, image_attacks, text_attacks

_NETWORK = "its weights are not part of these tests, and random ones say nothing"
NOT_ATTACKED: Mapping[str, str] = {
    "lpips": _NETWORK,
    "clip_score": _NETWORK,
    "aesthetic": _NETWORK,
    "pickscore": _NETWORK,
    "hpsv2": _NETWORK,
    "reward_model": _NETWORK,
    "function": "it is the user's",
    "remote": "it is another program's",
}
"""The rewards without an attack, and why."""


def all_attacks() -> list[Attack]:
    """Return every attack. A new reward adds its own to `images` or `texts`, or its reason to NOT_ATTACKED."""
    return [*image_attacks(), *text_attacks()]


def main() -> int:
    """Print the table; return 1 where an attack reaches more than it may."""
    succeeded = 0
    print("| reward | attack | value | at most |\n|---|---|---|---|")
    for attack in all_attacks():
        at_most = "none" if attack.at_most is None else f"{attack.at_most:.2f}"
        missing = attack.missing()
        value = None if missing else attack.score()
        shown = f"skipped: {missing}" if missing else "none" if value is None else f"{value:.3f}"
        succeeds = attack.succeeds(value)
        succeeded += succeeds
        print(
            f"| {attack.scored_by} | {attack.what} | {shown}{' SUCCEEDS' if succeeds else ''} | {at_most} |", flush=True
        )
    for reward, reason in NOT_ATTACKED.items():
        print(f"| {reward} | | not attacked: {reason} | |")
    return int(succeeded > 0)


if __name__ == "__main__":
    sys.exit(main())
