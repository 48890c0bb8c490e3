"""MLX: it has a format of its own, and says so when it meets another.

The rules stand in `load_adapters` of `mlx_lm/tuner/utils.py`, in mlx-lm's wheel of the version in `READ`. To renew
them, read that function again in a newer wheel, write its version into `READ`, and run tests/loaders and
tests/integration/test_exports.py.
"""

from publisher.loaders.finding import EXPORTED, MERGED, changes_nothing, finding, verdict
from publisher.loaders.subject import Subject
from publisher.records.filenames import MLX
from publisher.records.loaders import LoaderVerdict

READ = "mlx-lm 0.32.2"
WEIGHTS = "adapters.safetensors"


def judge(subject: Subject) -> LoaderVerdict:
    """Return the verdict: PEFT's files are not MLX's, whatever they hold; an export beside them is."""
    if "mlx" in subject.exports:
        return verdict("MLX", READ, basis="read", findings=(), flags=[f"--adapter-path {MLX}"], notes=[EXPORTED])
    lacking = [name for name in ("num_layers", "lora_parameters") if name not in subject.config]
    what = f"it looks for {WEIGHTS}" + (f", and for {' and '.join(lacking)} in adapter_config.json" if lacking else "")
    remedy = f"write exports: [mlx] in the manifest, for a file in its own format, or {MERGED}"
    return verdict(
        "MLX", READ, basis="read", findings=[finding("other format", what, remedy=remedy), *changes_nothing(subject)]
    )
