"""What a release brings to answer requests, tried before any long work: its module imports, its processor loads.

No weight is read. For the runner `decision` that is the module of the source repository, and each of transformers' Auto
classes that its loading names; for the runner `logits` a class that gives logits for text alone, and its tokenizer.
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import torch
import transformers

from publisher.adapters.loading import class_named, configuration, quiet
from publisher.border.installing import install_command
from publisher.errors import PublisherError, VerificationError
from publisher.manifest.architectures import gives_next_token
from publisher.manifest.schema import Variant

_MODULE = "publisher_release_module"
_LOADS = "load_release_model"
_PROCESSORS = ("AutoProcessor", "AutoTokenizer", "AutoImageProcessor", "AutoFeatureExtractor", "AutoVideoProcessor")
_WIDTH = 300  # characters of what the code says


def require_answering(variant: Variant, release: Path) -> None:
    """Raise unless the release in this folder has all that its runner needs beside weights, and all of it loads.

    Args:
        variant: the manifest's entry, which has a `verification`.
        release: the folder of the merged fine-tune, with its code, tokenizer and processor.

    Raises:
        VerificationError: the module is missing or does not import, a processor does not load, or the runner `logits`
            is asked of a class that it cannot ask.
        ValidationError: transformers has no such class.
    """
    settings = variant.verification
    if settings is None:
        return
    with quiet():
        if settings.runner == "logits":
            _require_language_model(variant.model_class, release)
            names = ["AutoProcessor"]
        else:
            names = _processors_of(release_module(release / settings.module))
        for name in names:
            with one_error(f"{name} does not load what {variant.source.where} brings"):
                getattr(transformers, name).from_pretrained(release, local_files_only=True)


def release_module(file: Path) -> ModuleType:
    """Run the source's module and return it; the manifest says that it may run.

    Raises:
        VerificationError: there is no such file, it cannot be imported, or it lacks what a decision module has.
    """
    spec = importlib.util.spec_from_file_location(_MODULE, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise VerificationError(f"the source has no {file.name}", next_step="correct module in the manifest")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses in it look themselves up
    with one_error(f"{file.name} of the source cannot be imported"), _no_bytecode():
        spec.loader.exec_module(module)
    missing = [name for name in (_LOADS, "encode_record", "collate_records") if not hasattr(module, name)]
    if missing:
        raise VerificationError(f"{file.name} of the source lacks {', '.join(missing)}", expected="a decision module")
    return module


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Keep Python from caching bytecode beside the module: the source's folder stays as it is."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


@contextmanager
def one_error(what: str) -> Iterator[None]:
    """Turn whatever a release's code, or a library over its files, raises into one VerificationError with its cause.

    Memory that runs out is no fault of theirs.
    """
    try:
        yield
    except (PublisherError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        told = " ".join(str(error).split())[:_WIDTH]
        raise VerificationError(
            f"{what}: {type(error).__name__}{f': {told}' if told else ''}",
            expected="code and files that work with the packages that are installed here",
            next_step=_way_on(error, told),
        ) from error


def _way_on(error: BaseException, told: str) -> str:
    if "torchvision" in told.casefold():
        return f"{install_command('vision')}; torch and torchvision must be built for the same device"
    if isinstance(error, ImportError) and error.name:
        return f"pip install {error.name.partition('.')[0]}"
    return "correct what it names; -v shows where it happened"


def _require_language_model(model_class: str, release: Path) -> None:
    """Raise unless the class gives logits for the token after a text, of which nothing but the text is known."""
    config, found = configuration(release), class_named(model_class)
    takes_text = found.main_input_name == "input_ids" and not getattr(config, "is_encoder_decoder", False)
    if not takes_text or not gives_next_token(model_class):
        raise VerificationError(
            f"the runner logits asks for the token after a text, and {model_class} is no such language model",
            expected="a class that ends in ForCausalLM, LMHeadModel or, without an encoder, ForConditionalGeneration",
            next_step="remove verification from the manifest: validation compares the outputs of any class",
        )


def _processors_of(module: ModuleType) -> list[str]:
    """Return the Auto classes that the module's loading names, itself or in functions of the module that it names."""
    seen: set[str] = set()
    left = [_LOADS]
    while left:
        name = left.pop()
        found = vars(module).get(name)
        if name not in seen and isinstance(found, FunctionType) and found.__module__ == module.__name__:
            left += _names_in(found.__code__)
        seen.add(name)
    return [name for name in _PROCESSORS if name in seen]


def _names_in(code: CodeType) -> list[str]:
    inner = [name for part in code.co_consts if inspect.iscode(part) for name in _names_in(part)]
    return [*code.co_names, *inner]
