"""Parameters of a model class that a checkpoint stores otherwise: in parts, as experts one by one, or in another order.

transformers converts such tensors whenever it loads or saves the class, and its own converters are applied here, to
one parameter at a time. This works on any reader, of files or of ranges.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from publisher.checkpoints.fp8_reader import steps
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.reading import Reader, in_blocks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor that parameters are made of.

    Attributes:
        name: in the file.
        renamed: what the class would call it, if it were not converted.
        pattern: of the converter, which it matches.
        header: of the tensor.
    """

    name: str
    renamed: str
    pattern: str
    header: TensorHeader


@dataclass(frozen=True, slots=True)
class Places:
    """Stands for the model where a converter asks what it makes: one that splits goes by the shapes of its targets.

    Attributes:
        parameters: what has the shape of each, by name.
    """

    parameters: "Mapping[str, torch.Tensor | TensorHeader]"

    def get_parameter(self, name: str) -> "torch.Tensor | TensorHeader":
        """Return what has the shape of a parameter, as a module does."""
        return self.parameters[name]


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """How parameters are made of stored tensors.

    Attributes:
        parts: the stored tensors, in the converter's order.
        converter: transformers' WeightConverter, without tensors.
        config: of the model.
        first: the parameter that the converter is called by; it may make several of the same tensors.
        places: of the parameters that it makes.
    """

    parts: tuple[Part, ...]
    converter: Any
    config: Any
    first: str
    places: Places

    def converted(self, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Return the parameters, by name, that the converter makes of the stored tensors, by name."""
        converter = deepcopy(self.converter)
        for part in self.parts:
            converter.add_tensor(self.first, part.name, part.pattern, tensors[part.name])
        return _alone(converter.convert(self.first, model=self.places, config=self.config))

    def reverted(self, parameters: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Return the stored tensors, by name, of which all of these parameters, by name, are made."""
        converter = self.converter.reverse_transform()
        keys = dict[str, str]()
        for name, parameter in parameters.items():
            keys[name], pattern = converter.rename_source_key(name)
            converter.add_tensor(keys[name], name, pattern, parameter)
        places = Places({part.renamed: part.header for part in self.parts})
        made = _alone(converter.convert(keys[self.first], model=places, config=self.config))
        return {part.name: made[part.renamed] for part in self.parts}


def _alone(made: "Mapping[str, list[torch.Tensor] | torch.Tensor]") -> "dict[str, torch.Tensor]":
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def in_parts_beside(
    headers: Mapping[str, TensorHeader], others: Mapping[str, TensorHeader]
) -> Mapping[str, TensorHeader]:
    """Return the headers with stored parts where the other checkpoint has them as they are, since it lacks some.

    So what it lacks is seen by its name.
    """
    apart = {
        name: {part.name: part.header for part in header.conversion.parts}
        for name, header in headers.items()
        if header.conversion is not None and any(part.name in others for part in header.conversion.parts)
    }
    if not apart:
        return headers
    kept = {name: header for name, header in headers.items() if name not in apart}
    return dict(sorted((kept | {name: one for parts in apart.values() for name, one in parts.items()}).items()))


def parts_of(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers with the stored parts in the place of the parameters that are made of them."""
    plain = {name: header for name, header in headers.items() if header.conversion is None}
    made = (header.conversion for header in headers.values() if header.conversion is not None)
    return plain | {part.name: part.header for conversion in made for part in conversion.parts}


class ConvertingReader:
    """Reads parameters as the model class has them, on top of a reader of the stored tensors."""

    def __init__(self, reader: Reader, headers: Mapping[str, TensorHeader]) -> None:
        """Prepare to read the tensors of these headers.

        Args:
            reader: of the tensors of `parts_of(headers)`.
            headers: of the parameters.
        """
        self._reader = reader
        self._conversions = {name: one.conversion for name, one in headers.items() if one.conversion is not None}

    def read(self, name: str) -> "torch.Tensor":
        """Return the tensor in its stored dtype."""
        conversion = self._conversions.get(name)
        if conversion is None:
            return self._reader.read(name)
        return conversion.converted({part.name: self._reader.read(part.name) for part in conversion.parts})[name]

    def blocks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """Return the tensor flat, in blocks of `elements` elements, of which the last may be shorter."""
        if name in self._conversions:
            return in_blocks(self.read(name), elements)
        return self._reader.blocks(name, elements)

    def steps(self, name: str) -> "torch.Tensor | None":
        """Return the distance of an FP8 weight's stored values at each element; None of any other tensor."""
        conversion = self._conversions.get(name)
        if conversion is None:
            return steps(name, self._reader)
        found = {part.name: steps(part.name, self._reader) for part in conversion.parts}
        known = {part: one for part, one in found.items() if one is not None}
        return conversion.converted(known)[name] if len(known) == len(found) else None
