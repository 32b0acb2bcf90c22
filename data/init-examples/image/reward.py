"""One number per image, higher is better; only images of the same prompt are compared."""

from PIL import ImageColor


def middle_colour(prompts, images, **columns):
    """Return the score of each image: here how near its middle is to the colour that the prompt names, from 0 to 1.

    `columns` has the other columns of the prompt file.
    """
    scores = []
    for prompt, image in zip(prompts, images, strict=True):  # a text, and a PIL image, RGB
        named = [word for word in prompt.lower().split() if word in ImageColor.colormap]
        wanted = ImageColor.getrgb(named[0] if named else "red")
        thirds = [side * part // 3 for part in (1, 2) for side in image.size]
        middle = image.crop(thirds).resize((1, 1)).getpixel((0, 0))
        scores.append(1 - sum(abs(a - b) for a, b in zip(middle, wanted, strict=True)) / (3 * 255))
    return scores
