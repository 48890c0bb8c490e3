"""The API's border: what libraries raise or draw on the way does not reach the caller.

A caller need not know torch or the Hub's client to tell what went wrong, and his own output stays his own. What his
own callback raises is his too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from publisher.border.causes import explained
from publisher.errors import PublisherError
from publisher.records.progress import Progress


@contextmanager
def causes_explained() -> Iterator[None]:
    """Raise each exception of the block as one of this project's errors, with the original as its `__cause__`.

    Ctrl-C passes as it is.

    Raises:
        PublisherError: the block raised any other exception.
    """
    try:
        yield
    except PublisherError:
        raise
    except Exception as error:
        raise explained(error) from error


@contextmanager
def called_with(progress: Progress) -> Iterator[Progress]:
    """Explain the causes of a block of long work, hide progress bars, and let the callback's own errors through.

    Args:
        progress: the caller's own function.

    Yields:
        The function that the work is to call instead.

    Raises:
        PublisherError: the block raised an exception that the callback did not.
    """
    own: list[Exception] = []

    def report(what: str, done: int = 0, total: int = 0) -> None:
        try:
            progress(what, done, total)
        except Exception as error:
            own.append(error)
            raise

    try:
        with _bars_hidden(), causes_explained():
            yield report
    except PublisherError as error:
        if error.__cause__ in own:
            raise own[0] from None
        raise


@contextmanager
def _bars_hidden() -> Iterator[None]:
    """Keep the Hub's client from drawing progress bars in the block, unless its own variable decides that."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
