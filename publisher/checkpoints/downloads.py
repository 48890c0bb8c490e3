"""Downloads what a machine lacks of a checkpoint of the Hub, when a whole model is needed there.

A local checkpoint that is not on this machine is refused.
"""

from publisher.checkpoints.companion_files import MODULES, going_along, module_folders
from publisher.checkpoints.snapshots import not_here
from publisher.hub import client as hub
from publisher.records.checkpoint import Snapshot
from publisher.records.progress import Progress, silent


def fetch_companions(snapshot: Snapshot, progress: Progress) -> None:
    """Download what a repository holds beside its weights, into the snapshot's folder: head, code, tokenizer, modules.

    A local folder has them. Weights in other formats are left out (`companion_files`).

    Raises:
        FetchError: modules.json is not readable.
        HubError: the Hub cannot be reached, or refuses.
    """
    checkpoint = snapshot.checkpoint
    if checkpoint.kind != "hub":
        return
    progress(f"fetching the other files of {checkpoint.short}")
    there = {file.name for file in checkpoint.files}
    names = [file.path for file in hub.list_files(checkpoint.name, checkpoint.revision)]
    modules = frozenset[str]()
    if MODULES in names:
        modules = module_folders(hub.download(checkpoint.name, checkpoint.revision, filename=MODULES))
    for name in going_along(names, modules):
        if name not in there:
            hub.download(checkpoint.name, checkpoint.revision, filename=name)


def brought_here(snapshot: Snapshot) -> Snapshot:
    """Return the checkpoint as files on this machine.

    Where it is not yet here, it is downloaded, with what lies beside it in the repository.

    Raises:
        FetchError: a local checkpoint is not on this machine.
        HubError: the Hub cannot be reached, or refuses.
    """
    checkpoint = snapshot.checkpoint
    if all((snapshot.folder / file.name).is_file() for file in checkpoint.files):
        return snapshot
    if checkpoint.kind != "hub":
        raise not_here(snapshot)
    files = [hub.download(checkpoint.name, checkpoint.revision, filename=file.name) for file in checkpoint.files]
    found = Snapshot(checkpoint=checkpoint, folder=files[0].parent)
    fetch_companions(found, silent)
    return found
