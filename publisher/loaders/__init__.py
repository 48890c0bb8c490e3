"""Which loaders take an adapter, with which flags, and whether each module's scale comes out right there.

One module for each loader, `on_NAME`: PEFT and transformers are run, on the base's class without weights; of the others
the rules are followed as they stand in the source of one version, which the verdict names. `subject` is what is judged,
and `finding` makes verdicts of findings. What none of this can know is whether a GPU kernel does what it should
(docs/compat.md).

It refuses a folder that holds no adapter, and a base whose class transformers does not have. Begin with `subject`, then
`on_peft`, the shortest judge.
"""

from publisher.loaders.subject import Subject
from publisher.records.loaders import LoaderVerdict
from publisher.records.validation import Validation


def judge(subject: Subject, validation: Validation | None = None) -> tuple[LoaderVerdict, ...]:
    """Return the verdict on every loader, in a fixed order.

    Args:
        subject: the adapter and its base.
        validation: one that these very files have passed: PEFT is not run again on the adapter's own class.

    Raises:
        ValidationError: transformers has no class for this base.
    """
    from publisher.loaders import on_llama_cpp, on_mlx, on_peft, on_sglang, on_transformers, on_vllm
    from publisher.loaders.parameters import judged

    return (
        on_peft.judge(subject, validation),
        on_transformers.judge(subject),
        judged(on_vllm, subject, name="vLLM"),
        judged(on_sglang, subject, name="SGLang"),
        judged(on_llama_cpp, subject, name="llama.cpp"),
        on_mlx.judge(subject),
    )
