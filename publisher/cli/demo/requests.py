"""The demo's requests, with right answers, and the files that let its models be asked: tokenizer, images, head.

All is drawn by seeded generators, and needs neither a network nor a model. The tokenizer takes any text: it knows
every byte, and the words of the requests as one token each.
"""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

ROWS, ROWS_WITH_IMAGES = 24, 12
_SIDE = 64  # pixels: the demo's vision tower has a position for each of 8 x 8 patches of 8 pixels
_PLACES = ("kitchen", "harbour", "library", "station", "garden", "market")
_THINGS = ("lamp", "boat", "letter", "train", "basket", "ladder", "clock", "bottle")
_COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 200), "grey": (128, 128, 128)}
_LEVELS = ("never", "seldom", "often", "always")
_WORDS = (*_PLACES, *_THINGS, *_COLOURS, *_LEVELS, "noul", "choice", "score", "true", "false", "yes", "no", "place")
VOCABULARY = 512
_SPECIAL = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def write_requests(folder: Path) -> None:
    """Write `clef.jsonl`, `clef-flash.jsonl` and `images.jsonl`, whose images are data URLs and files by turns."""
    (folder / "images").mkdir(parents=True)
    for name in ("clef", "clef-flash"):
        write_rows(folder / f"{name}.jsonl", name, count=ROWS)
    _write(folder / "images.jsonl", _rows_with_images(folder))


def write_rows(file: Path, name: str, *, count: int) -> None:
    """Write requests with questions of all three types.

    Args:
        file: the file to write, a request a line.
        name: the seed that all is drawn by, and the beginning of each request's id.
        count: how many requests.
    """
    _write(file, _rows(name, count))


def write_processor(folder: Path) -> None:
    """Write tokenizer and image processor of a model with the demo's vocabulary and vision tower."""
    from transformers import PreTrainedTokenizerFast

    end, start, stop, image, video = _SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        eos_token=end,
        pad_token=end,
        extra_special_tokens=[start, stop, image, video],
    )
    fast.save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": _SIDE**2, "longest_edge": _SIDE**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_bytes((json.dumps(settings, indent=2) + "\n").encode())


def _tokenizer() -> Any:
    """Build a byte-level BPE, whose merges build each word from its beginning."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    merges: dict[tuple[str, str], None] = {}
    for word in (f"\u0120{word}" for word in _WORDS):
        for end in range(1, len(word)):
            if len(tokens) < VOCABULARY - len(_SPECIAL):
                merges[word[:end], word[end]] = tokens[word[: end + 1]] = None
    free = VOCABULARY - len(_SPECIAL) - len(tokens)
    names = [*tokens, *(f"<|unused_{number}|>" for number in range(free)), *_SPECIAL]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(names)}, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return made


# --- rows ---------------------------------------------------------------------------------------------------


def _write(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    file.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())


def _random(name: str) -> Random:
    return Random(f"20/requests/{name}")  # noqa: S311 - requests, not secrets


def _rows(name: str, count: int) -> Iterator[dict[str, Any]]:
    random = _random(name)
    for number in range(count):
        place, thing, colour = (random.choice(one) for one in (_PLACES, _THINGS, [*_COLOURS]))
        level = random.randrange(len(_LEVELS))
        state: Any = f"A {colour} {thing} is {_LEVELS[level]} seen in the {place}."
        if number % 3 == 0:
            state = {"place": place, "thing": thing, "colour": colour, "seen": _LEVELS[level]}
        asked = random.choice(_THINGS)
        questions = {
            "is_it": ({"type": "noul", "instructions": f"Is it a {asked}?"}, asked == thing),
            "where": (_choice("In what place?", [*_PLACES]), place),
            "how_often": ({"type": "score", "instructions": "How often?", "criteria": [*_LEVELS]}, level),
        }
        yield _row(f"{name}-{number}", ("things", "places")[number % 2], state=state, questions=questions, draw=random)


def _choice(instructions: str, options: list[str]) -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "criteria": {one: f"the {one}" for one in options}}


def _row(id_: str, family: str, *, state: Any, questions: dict[str, tuple[Any, Any]], draw: Random) -> dict[str, Any]:
    """Build a row of the Decision Index's form; to one question in eight no right answer is given."""
    return {
        "id": id_,
        "family": family,
        "split": "test",
        "state": state,
        "questions": {name: question for name, (question, _) in questions.items()},
        "expected": {name: gold if draw.random() > 1 / 8 else None for name, (_, gold) in questions.items()},
    }


def _rows_with_images(folder: Path) -> Iterator[dict[str, Any]]:
    random = _random("images")
    for number in range(ROWS_WITH_IMAGES):
        colours = [random.choice([*_COLOURS]) for _ in range(1 + number % 2)]
        images = [_png(_COLOURS[colour], random) for colour in colours]
        questions = {
            "colour": (_choice("Of what colour is the square?", [*_COLOURS]), colours[0]),
            "red": ({"type": "noul", "instructions": "Is a square red?"}, "red" in colours),
        }
        row = _row(f"image-{number}", "colours", state="A square.", questions=questions, draw=random)
        yield row | {"images": [_reference(folder, f"{number}-{i}", png) for i, png in enumerate(images)]}


def _reference(folder: Path, name: str, png: bytes) -> str:
    if int(name[0]) % 2:
        return f"data:image/png;base64,{base64.b64encode(png).decode()}"
    file = Path("images", f"{name}.png")
    (folder / file).write_bytes(png)
    return file.as_posix()


def _png(colour: tuple[int, int, int], random: Random) -> bytes:
    """Draw a square of the colour somewhere on white."""
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    left, top, side = random.randrange(32), random.randrange(32), random.randrange(12, 32)
    image.paste(colour, (left, top, left + side, top + side))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
