"""The stages, in their order, as data: what each needs, what it leaves, what its result rests on, how it is called.

`STAGES` is the only list of them. The command line's `--from` and `--until`, the loop in `run`, the markers and the
outcome follow from it. To add a stage, write one module in `stages/` with a function of the stage's name, and one line
here.

There are two kinds: those of `OF_VARIANT` run for each variant of the manifest, those of `OF_RELEASE` once, when all
variants are done. No stage's module is imported before it runs, so that `publish --help` starts without torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from publisher.pipeline import calls, keys
from publisher.records.filenames import (
    ADAPTER,
    ADAPTER_CONFIG,
    CARD,
    EXPORTS,
    EXTRACTION,
    LOADERS,
    RESIDUAL,
    SIGNATURE,
    VERIFICATION,
)

if TYPE_CHECKING:
    from publisher.pipeline.sites import ReleaseSite, Site, VariantSite

SiteT = TypeVar("SiteT", bound="Site")


def _always(_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Stage(Generic[SiteT]):
    """One stage.

    Attributes:
        name: what `--from` and `--until` call it.
        needs: the stages whose results it takes.
        writes: the files that it may leave, the first of which holds its record.
        published: its files lie in the staged tree and are part of the release; otherwise they lie in the work folder.
        rests_on: gives all that decides its result but the code, as JSON can hold it. Its result is reused as long as
            that, the code and its files are the same. None for a stage that has to look at the world each time.
        on_demand: it runs whenever a stage that needs it does, even where `--from` names a later one.
        applies: whether there is anything to do; where there is not, files of an earlier manifest are removed.
        before: finds, before any long work, what would make the stage fail in the end.
        proof: what its result proves; nothing is published without it. Empty where publishing does not depend on it.
        call: calls the stage's function with what it takes of the site. None where the function takes the site itself.
        package: where its module lies.
    """

    name: str
    needs: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    published: bool = True
    rests_on: Callable[[SiteT], object] | None = None
    on_demand: bool = False
    applies: Callable[[SiteT], bool] = _always
    before: Callable[[SiteT], object] | None = None
    proof: str = ""
    call: Callable[[SiteT], object] | None = None
    package: str = "publisher.pipeline.stages"

    @property
    def module(self) -> str:
        """The full name of its module, whose code its result rests on."""
        return f"{self.package}.{self.name}"

    @property
    def marker(self) -> str:
        """The name of the file in the work folder that says what its result rests on."""
        return f"{self.name}.json"

    def run(self, site: SiteT) -> object:
        """Return its result, made anew."""
        if self.call is not None:
            return self.call(site)
        function: Callable[[SiteT], object] = getattr(import_module(self.module), self.name)
        return function(site)


OF_VARIANT: "tuple[Stage[VariantSite], ...]" = (
    Stage("fetch", on_demand=True, call=calls.fetch),
    Stage(
        "extract",
        needs=("fetch",),
        writes=(EXTRACTION, ADAPTER_CONFIG, ADAPTER, RESIDUAL, *(name for names in EXPORTS.values() for name in names)),
        rests_on=keys.extraction,
        call=calls.extract,
    ),
    Stage(
        "validate",
        needs=("fetch", "extract"),
        writes=("validation.json",),
        published=False,
        rests_on=keys.validation,
        proof="validation",
        call=calls.validate,
    ),
    Stage(
        "loaders",
        needs=("extract", "validate"),
        writes=(LOADERS,),
        rests_on=keys.loaders,
        proof="the judgement by loaders' rules",
    ),
    Stage(
        "verify",
        needs=("fetch", "extract"),
        writes=(VERIFICATION,),
        rests_on=keys.verification,
        applies=lambda site: site.variant.verification is not None,
        before=lambda site: site.request_files,
        proof="verification",
        call=calls.verify,
    ),
)
OF_RELEASE: "tuple[Stage[ReleaseSite], ...]" = (
    Stage("card", needs=("extract",), writes=(CARD,)),
    Stage("sign", needs=("card",), writes=(SIGNATURE,), on_demand=True, before=calls.require_signer, call=calls.sign),
    Stage("push", needs=("sign",), before=calls.require_writable, call=calls.push),
    Stage("read_back", needs=("push",), applies=lambda site: not site.options.dry_run, call=calls.read_back),
)
STAGES: tuple[Stage[Any], ...] = (*OF_VARIANT, *OF_RELEASE)
NAMES = tuple(stage.name for stage in STAGES)


def stage_named(name: str) -> Stage[Any]:
    """Return the stage of this name.

    Raises:
        KeyError: there is none.
    """
    return {stage.name: stage for stage in STAGES}[name]
