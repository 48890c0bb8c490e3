"""docs/cluster.md is held against the installed clients, without a cluster, a Hub or SLURM.

Commands of Ray, of the Hub's client and of publish are parsed by the clients' own click commands and not run. kubectl
and docker parse theirs when asked for help. KubeRay and SLURM have no client here, so that their own fields and options
are held against nothing. What KubeRay hands to Kubernetes as it is, the pods, kubectl reads.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import ray
import yaml
from huggingface_hub.cli.hf import app as hf
from markdown_it import MarkdownIt
from markdown_it.token import Token
from ray.scripts.scripts import cli as ray_cli

from publisher.cli.app import cli as publish_cli

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/cluster.md"
CLIENTS: dict[str, click.Command] = {"ray": ray_cli, "hf": hf, "publish": publish_cli}
START, SYMMETRIC_RUN = ray_cli.commands["start"], ray_cli.commands["symmetric-run"]
ASKED_FOR_HELP = ("kubectl", "docker")
# what stands for a placeholder that a client takes for a number
VARIABLES = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "64", "head": "node1"}


# --- what the page shows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block, and its language."""

    language: str
    text: str


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [block.text for block in _blocks() if block.language == language]


def _blocks() -> list[Block]:
    return [Block(token.info, token.content) for token in _tokens() if token.type == "fence"]


def _tokens() -> list[Token]:
    return MarkdownIt().enable("table").parse(PAGE.read_text(encoding="utf-8"))


def is_script(text: str) -> bool:
    return text.startswith("#!")


def script() -> str:
    """The one batch script."""
    [text] = [text for text in blocks("bash") if is_script(text)]
    return text


def manifest() -> dict[str, Any]:
    """The RayJob."""
    [text] = blocks("yaml")
    found = yaml.safe_load(text)
    assert isinstance(found, dict)
    return found


def words(line: str) -> list[str]:
    """The words of a line as a shell hands them on: no comment, no redirection, variables filled in."""
    filled = re.sub(r"\$(\w+)", lambda found: VARIABLES.get(found[1], found[0]), re.sub(r" > \S+", "", line))
    return shlex.split(filled, comments=True)


def lines(text: str) -> list[list[str]]:
    """Each command of a block, in words."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [found for line in joined.splitlines() if (found := words(line))]


def mentioned() -> list[str]:
    """Commands in the running text: more than a name, in backticks."""
    inline = [child for token in _tokens() for child in token.children or [] if child.type == "code_inline"]
    names = "|".join([*CLIENTS, *ASKED_FOR_HELP])
    return list(dict.fromkeys(code.content for code in inline if re.match(rf"({names}) [a-z-]", code.content)))


def shown() -> list[list[str]]:
    """Every command of the page in words, those inside of other commands too."""
    typed = [line for text in blocks("bash") if not is_script(text) for line in lines(text)]
    indented = [token.content for token in _tokens() if token.type == "code_block"]
    typed += [words(re.split(r"\s{2,}", line)[0]) for text in indented for line in text.splitlines()]
    typed += [line for line in lines(script()) if line[0] in CLIENTS]
    typed += [words(manifest()["spec"]["entrypoint"]), ray_of_srun()]
    return typed + [inner for line in typed if (inner := after_dashes(line))]


def srun() -> list[str]:
    [line] = [line for line in lines(script()) if line[0] == "srun"]
    return line


def ray_of_srun() -> list[str]:
    """The Ray command that srun starts."""
    line = srun()
    return line[line.index("ray") :]


def after_dashes(line: list[str]) -> list[str]:
    """The command that a command is given after `--`."""
    return line[line.index("--") + 1 :] if "--" in line else []


def of(name: str) -> list[str]:
    """The commands of one program, as one may type them; for parametrising."""
    return list(dict.fromkeys(shlex.join(line) for line in shown() if line[0] == name))


# --- parsing without running ----------------------------------------------------------------------------------------


def parsed(line: str) -> click.Context:
    """The context that the client itself makes of a command line; an error where it would refuse it."""
    command, above, rest = found_in_client(line)
    if command is SYMMETRIC_RUN:
        return parsed_for_each_node(rest)
    context = command.make_context(command.name, rest, parent=above)
    if options := options_taken_for_words(context, after_dashes(shlex.split(line))):
        raise click.NoSuchOption(options[0], ctx=context)
    return context


def found_in_client(line: str) -> tuple[click.Command, click.Context | None, list[str]]:
    """The command that a line names, the context of the group it is in, and the words that remain."""
    name, *rest = shlex.split(line)
    command, above = CLIENTS[name], None
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        above = click.Context(command, parent=above, info_name=command.name)
        found = command.get_command(above, rest.pop(0))
        if found is None:
            raise click.UsageError(f"no such command: {line}")
        command = found
    return command, above, rest


def parsed_for_each_node(rest: list[str]) -> click.Context:
    """`ray symmetric-run` hands what it does not know to `ray start`, up to `--`."""
    context: click.Context = SYMMETRIC_RUN.make_context("symmetric-run", rest[: rest.index("--")])
    START.make_context("start", ["--head", *context.params["ray_args_and_entrypoint"]])
    return context


def options_taken_for_words(context: click.Context, passed_on: list[str]) -> list[str]:
    """`hf jobs run` takes an option that it does not know for the image or for a part of the command."""
    names = [parameter.name or "" for parameter in context.command.params if isinstance(parameter, click.Argument)]
    values = [context.params.get(name) or () for name in names]
    given = [word for value in values for word in ([value] if isinstance(value, str) else value)]
    assert given[len(given) - len(passed_on) :] == passed_on
    return [word for word in given[: len(given) - len(passed_on)] if word.startswith("-")]


def helped(line: str) -> "subprocess.CompletedProcess[str]":
    """What kubectl or docker says to a line that asks for help: it parses the line first."""
    name, *rest = shlex.split(line)
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([program, *rest, "--help"], capture_output=True, text=True, check=False)


# --- no kind goes unchecked -----------------------------------------------------------------------------------------


def test_the_page_has_commands_of_every_kind() -> None:
    kinds = {tuple(line[:1]) for line in shown()}
    assert kinds >= {(name,) for name in (*CLIENTS, *ASKED_FOR_HELP)}
    assert {"start", "status", "stop", "symmetric-run", "get-auth-token"} <= {
        line[1] for line in shown() if line[0] == "ray"
    }
    assert {("jobs", "run"), ("jobs", "uv")} <= {tuple(line[1:3]) for line in shown() if line[0] == "hf"}
    engines = {word for line in shown() if "--engine" in line for word in [line[line.index("--engine") + 1]]}
    assert {"ray", "ray://head.example.org:10001"} <= engines


def test_every_command_in_a_block_is_of_a_program_that_is_checked() -> None:
    checked = {*CLIENTS, *ASKED_FOR_HELP, "pip", "export"}
    assert {line[0] for line in shown()} <= checked
    steps = {line[0] for line in lines(script()) if not line[0].startswith("head=")}
    assert steps <= {*CLIENTS, "set", "cd", "export", "srun"}


def test_every_block_is_of_a_language_that_is_checked() -> None:
    assert {block.language for block in _blocks()} == {"bash", "yaml", "dockerfile"}


# --- Ray, the Hub's client, publish ---------------------------------------------------------------------------------


@pytest.mark.parametrize("line", of("ray"))
def test_ray_takes_the_command(line: str) -> None:
    parsed(line)


@pytest.mark.parametrize("line", of("hf"))
def test_the_hubs_client_takes_the_command(line: str) -> None:
    parsed(line)


@pytest.mark.parametrize("line", of("publish"))
def test_publish_takes_the_command(line: str) -> None:
    parsed(line)


@pytest.mark.parametrize("line", mentioned())
def test_a_command_in_the_text_is_one_of_its_client(line: str) -> None:
    if line.split(maxsplit=1)[0] in ASKED_FOR_HELP:
        assert helped(line).returncode == 0
    elif found_in_client(line)[2]:
        parsed(line)


@pytest.mark.parametrize("line", [line for line in of("hf") if " run " in line])
def test_a_job_is_given_the_publish_command_whole(line: str) -> None:
    context = parsed(line)
    given = context.params.get("command") or [context.params["script"], *context.params["script_args"]]
    assert list(given) == after_dashes(shlex.split(line))
    assert given[0] == "publish"
    assert context.params["secrets"] == ["HF_TOKEN"]


@pytest.mark.parametrize(
    "line",
    [
        "ray start --heda",
        "ray strat --head",
        "ray start --num-cpus=many",
        "ray symmetric-run --adress node1:6379 -- publish",
        "ray symmetric-run --address node1:6379 --num-cpuz=2 -- publish",
        "ray symmetric-run --address node1:6379 --min-node 2 -- publish",
        "hf jobs run --flavour h200 image -- publish",
        "hf jobs run --flavor h200 --time-out 12h image -- publish",
        "hf jobs run image --flavour h200 publish",
        "hf jobs uv run --wiht publisher -- publish",
        "hf jobs lgos --follow JOB_ID",
        "hf jobs logs --folow JOB_ID",
        "publish --manifest M --enginge ray",
        "publish pubish --manifest M",
    ],
)
def test_a_misspelt_command_is_refused(line: str) -> None:
    with pytest.raises(click.UsageError):
        parsed(line)


# --- Kubernetes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [*of("kubectl"), *of("docker")])
def test_kubectl_and_docker_take_the_command(line: str) -> None:
    done = helped(line)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", ["kubectl apply --filname publish.yaml", "docker build --tagg publisher:1 ."])
def test_kubectl_and_docker_refuse_a_misspelt_option(line: str) -> None:
    assert helped(line).returncode != 0


def at(path: str) -> dict[str, Any]:
    """A part of the RayJob."""
    found: Any = manifest()
    for key in re.findall(r"\w+", path):
        found = found[int(key) if key.isdigit() else key]
    assert isinstance(found, dict)
    return found


def templates() -> dict[str, dict[str, Any]]:
    """The pods of head and workers."""
    cluster = at("spec.rayClusterSpec")
    groups = {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {name: group["template"] for name, group in groups.items()}


def kept_by_kubectl(template: dict[str, Any]) -> dict[str, Any]:
    """The pod as kubectl writes it back: a field that it does not know is gone."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
    line = [program, "set", "env", "--local", "--filename=-", "--output=json", "SEEN=1"]
    done = subprocess.run(line, input=yaml.safe_dump(pod), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    assert isinstance(found, dict)
    return found


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Where the one has something that the other has not."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [place for key in given for place in lost(given[key], kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) <= len(kept):
        return [place for number, one in enumerate(given) for place in lost(one, kept[number], f"{path}[{number}]")]
    return [] if given == kept else [path]


@pytest.mark.parametrize("name", templates())
def test_kubectl_knows_every_field_of_the_pods(name: str) -> None:
    assert lost(templates()[name], kept_by_kubectl(templates()[name])) == []


def test_a_misspelt_field_of_a_pod_is_found() -> None:
    template = templates()["gpu"]
    template["spec"]["containers"][0]["resuorces"] = template["spec"]["containers"][0].pop("resources")
    assert lost(template, kept_by_kubectl(template)) == [".spec.containers[0].resuorces"]


@pytest.mark.parametrize("group", ["headGroupSpec", "workerGroupSpecs[0]"])
def test_ray_start_takes_the_parameters_of_each_group(group: str) -> None:
    given = at(f"spec.rayClusterSpec.{group}")["rayStartParams"]
    START.make_context("start", ["--head", *(f"--{name}={value}" for name, value in given.items())])


def test_workers_ask_for_gpus_and_hold_whole_tasks() -> None:
    [worker], [head] = (templates()[name]["spec"]["containers"] for name in ("gpu", "head"))
    assert worker["image"] == head["image"]
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) >= 1
    threads = {variable["name"]: variable.get("value") for variable in head["env"]}["OMP_NUM_THREADS"]
    assert int(worker["resources"]["limits"]["cpu"]) % int(threads) == 0


def test_secret_and_image_of_the_rayjob_are_those_that_the_commands_make() -> None:
    [made] = [line for line in lines("\n".join(blocks("bash"))) if line[:3] == ["kubectl", "create", "secret"]]
    [built] = [line for line in lines("\n".join(blocks("bash"))) if line[:2] == ["docker", "build"]]
    for template in templates().values():
        [container] = template["spec"]["containers"]
        [token] = [variable["valueFrom"]["secretKeyRef"] for variable in container["env"] if "valueFrom" in variable]
        assert (token["name"], token["key"]) == (made[4], "token")
        assert container["image"] == built[built.index("--tag") + 1]


# --- versions -------------------------------------------------------------------------------------------------------


def pinned() -> str:
    """The version of Ray in constraints.txt."""
    [line] = re.findall(r"^ray(?:\[.*\])?==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return str(line)


def test_the_rayjob_and_the_image_have_the_pinned_ray() -> None:
    [image] = blocks("dockerfile")
    assert at("spec.rayClusterSpec")["rayVersion"] == pinned()
    assert re.findall(r"ray\[default\]==([\d.]+)", image) == [pinned()]


def test_the_installed_ray_is_the_pinned_one() -> None:
    assert ray.__version__ == pinned()


def test_pip_installs_the_pinned_versions() -> None:
    [line] = [line for text in blocks("bash") if not is_script(text) for line in lines(text) if line[0] == "pip"]
    assert line[:4] == ["pip", "install", "--constraint", "constraints.txt"]
    assert line[4:] == [".[ray]", "ray[default]"]


# --- SLURM ----------------------------------------------------------------------------------------------------------


def test_bash_reads_the_batch_script() -> None:
    done = subprocess.run(["bash", "-n"], input=script(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def shellcheck(text: str) -> "subprocess.CompletedProcess[str]":
    """The one of this environment."""
    program = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program is not None
    return subprocess.run([program, "-"], input=text, capture_output=True, text=True, check=False)


def test_shellcheck_finds_nothing_in_the_batch_script() -> None:
    done = shellcheck(script())
    assert (done.returncode, done.stdout) == (0, "")


def test_shellcheck_would_find_something() -> None:
    assert shellcheck(script().replace('"$SLURM_JOB_NODELIST"', "$SLURM_JOB_NODELIST")).returncode == 1


def test_ray_is_one_process_on_each_node_of_the_batch_job() -> None:
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", script(), re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    assert int(asked["cpus-per-task"]) % int(re.findall(r"OMP_NUM_THREADS=(\d+)", script())[0]) == 0
