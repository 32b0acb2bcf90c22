"""A reward function that knows no value for red things."""


def fails_for_reds(completions: list[object], prompts: list[str], **columns: object) -> list[float]:
    return [float("nan") if "red" in prompt else 1.0 for prompt in prompts]
