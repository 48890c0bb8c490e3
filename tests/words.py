"""A tokenizer for small models: one token for each of the words w0 to w59."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_END = "<end>"


def write_tokenizer(folder: Path) -> None:
    """Beside a model's weights; what is no such word becomes the end of the text."""
    vocabulary = {_END: 0} | {f"w{i}": i + 1 for i in range(60)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=_END))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=_END).save_pretrained(folder)
