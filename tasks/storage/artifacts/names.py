"""Names of files and folders as manifests and references give them; whoever writes in a bucket may have chosen them."""

import unicodedata


def stays_inside(name: str) -> bool:
    """Whether a relative name, taken part by part, stays in the folder that it is looked up in."""
    if "\\" in name or any(unicodedata.category(letter) == "Cc" for letter in name):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))
