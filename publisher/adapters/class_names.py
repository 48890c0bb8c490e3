"""The names that a model class has for the tensors of a checkpoint: PEFT finds its places by these.

Files may have other names (an earlier version's, the Hub's, those of a model without a head) and may hold a parameter
in parts. transformers maps them whenever it loads the class, and its own mapping is applied here to headers alone. What
the class computes by itself, such as masks and positions that earlier versions stored, is left out. A tensor that the
class has no place for keeps its name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from publisher.checkpoints.converting_reader import Conversion, Part, Places
from publisher.checkpoints.dtypes import safetensors_dtype, torch_dtype
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.wrappers import unwrapped

_COMPUTED = re.compile(  # masks, frequencies and positions that earlier versions of many classes stored
    r"(^|\.)(rotary_emb\.inv_freq|position_ids|relative_position_index|(attn|attention)\.(bias|masked_bias|causal_mask))$"
)


@dataclass(frozen=True, slots=True)
class ClassNames:
    """What a class built without weights says of names.

    Attributes:
        parameters: tensors that the class keeps, on the meta device, by name.
        computed: patterns of what it computes by itself, whatever a checkpoint holds.
        optional: patterns of what it passes over when it loads.
        prefix: of the part that the model has without its head.
        renamings: transformers' WeightRenamings, in their order.
        converters: transformers' WeightConverters.
        tied: of a parameter that shares another's tensor, the name of that one.
        tieable: the same of what the class ties if its configuration says so.
        config: of the model.
    """

    parameters: Mapping[str, torch.Tensor]
    computed: tuple[re.Pattern[str], ...]
    optional: tuple[re.Pattern[str], ...]
    prefix: str
    renamings: tuple[WeightRenaming, ...]
    converters: tuple[WeightConverter, ...]
    tied: Mapping[str, str]
    tieable: Mapping[str, str]
    config: Any

    @classmethod
    def of(cls, model: Any) -> "ClassNames":
        """Return the names of a model on the meta device."""
        parameters = dict(model.state_dict())
        transforms = get_model_conversion_mapping(model)
        computed = (name for name, _ in model.named_buffers() if name not in parameters)
        optional = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return cls(
            parameters=parameters,
            computed=(_COMPUTED, *(re.compile(rf"^{re.escape(name)}$") for name in computed)),
            optional=tuple(re.compile(pattern) for pattern in optional),
            prefix=model.base_model_prefix,
            renamings=tuple(one for one in transforms if isinstance(one, WeightRenaming)),
            converters=tuple(one for one in transforms if isinstance(one, WeightConverter)),
            tied=dict(getattr(model, "all_tied_weights_keys", None) or {}),
            tieable=dict(getattr(model, "_tied_weights_keys", None) or {}),
            config=model.config,
        )

    def applied(self, headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """Return the headers by the class's names, sorted.

        A header that was renamed has its `stored` name, one that is made of others its `conversion`.
        """
        found: dict[str, TensorHeader] = {}
        parts: dict[str, list[Part]] = {}
        for stored, short in sorted(
            unwrapped(headers, self.parameters).items(), key=lambda pair: dot_natural_key(pair[1])
        ):
            header = headers[stored]
            name, pattern = self._renamed(short)
            if name not in self.parameters:
                if not self._matches(short, self.computed):
                    found[stored] = header
            elif pattern is not None:
                parts.setdefault(name, []).append(Part(stored, self._unconverted(short, name), pattern, header))
            elif name in found:  # a second spelling: transformers would take either
                found[stored] = header
            else:
                found[name] = header if name == stored else replace(header, stored=stored)
        for first, stored_parts in parts.items():
            found |= self._converted(first, tuple(stored_parts))
        for name, original in self.tied.items():  # a file may have either
            if name in found and original not in found and found[name].conversion is None:
                header = found.pop(name)
                found[original] = replace(header, stored=header.stored or name)
        return dict(sorted(found.items()))

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """Return the class's name of a stored tensor, and the pattern of the converter that takes it, if one does."""
        found: tuple[str, str | None] = rename_source_key(
            name, self.renamings, self.converters, self.prefix, self.parameters
        )
        if found[0] not in self.parameters and name in self.parameters:
            return name, None
        return found

    def _unconverted(self, stored: str, name: str) -> str:
        """Return what the class would call a stored tensor, if it were not converted to the parameter `name`."""
        renamed: str = apply_renamings(stored, self.renamings)
        start = f"{self.prefix}."
        if not self.prefix or name.startswith(start) == renamed.startswith(start):
            return renamed
        return f"{start}{renamed}" if name.startswith(start) else renamed.removeprefix(start)

    def passes_over(self, name: str) -> bool:
        """Return whether the class loads without a word a checkpoint that has a tensor of this name, or has none."""
        return self._matches(name, self.optional)

    def _matches(self, name: str, patterns: Iterable[re.Pattern[str]]) -> bool:
        renamed, _ = self._renamed(name)
        spellings = (name, renamed, renamed.removeprefix(f"{self.prefix}."), f"{self.prefix}.{renamed}")
        return any(pattern.search(one) for pattern in patterns for one in spellings)

    def _converted(self, first: str, parts: tuple[Part, ...]) -> dict[str, TensorHeader]:
        """Return the headers of the parameters made of these tensors; of the tensors where they make no such one."""
        of_pattern = {pattern: one for one in self.converters for pattern in one.source_patterns}
        conversion = Conversion(parts, of_pattern[parts[0].pattern], self.config, first, Places(self.parameters))
        stored = {part.name: part.header for part in parts}
        try:
            made = conversion.converted({name: _empty(header) for name, header in stored.items()})
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
            return stored
        if any(name not in self.parameters or one.shape != self.parameters[name].shape for name, one in made.items()):
            return stored
        size = sum(header.stop - header.start for header in stored.values())
        conversion = replace(conversion, places=Places({name: self.parameters[name] for name in made}))
        header = replace(
            parts[0].header, sha256=None, stop=parts[0].header.start + size, scale=None, conversion=conversion
        )
        return {
            name: replace(header, dtype=safetensors_dtype(one.dtype), shape=tuple(one.shape))
            for name, one in made.items()
        }


def _empty(header: TensorHeader) -> torch.Tensor:
    return torch.empty(header.shape, dtype=torch_dtype(header), device="meta")
