"""What flags mean together."""

from __future__ import annotations

from argparse import Namespace

from ds_runtime.cli.config_file import FromFile, given
from ds_runtime.common.address import is_loopback
from ds_runtime.errors import ConfigError


def settle(namespace: Namespace) -> list[str]:
    """What flags mean together; the sentences for the start. Raises ConfigError."""
    values, said = given(namespace), getattr(namespace, "config", None)
    notes = [*(said.values.get("notes", ()) if said else ()), *getattr(namespace, "notes", ())]
    at = values.get("dist_init_addr")
    if at is not None and values.get("nnodes", 1) == 1:
        notes.append(f"--dist-init-addr {at}: not needed: ranks of one machine find each other")
    elif at is not None and "dist_token_file" not in values and is_loopback(at.rpartition(":")[0]):
        notes.append(
            f"--dist-init-addr {at}: without --dist-token-file, whoever is on this machine may join"
        )
    tp, dp = values.get("tp", 1), values.get("dp", 1)
    weak = {**(said.weak if said else {}), **getattr(namespace, "weak", {})}
    groups, divided = weak.get("dp", dp), values.get("enable_dp_attention")
    if groups != 1 and "dp" in weak and not divided:
        raise ConfigError(f"--attn-dp-size {groups}: not with --no-enable-dp-attention")
    if groups != dp and (groups != 1 or divided):  # else they are replicas of one group each
        raise ConfigError(
            f"--attn-dp-size {groups}: --dp {dp} says another number of groups: replicas that "
            "divide attention by sequences are not built: give --attn-dp-size alone"
        )
    firm = {*vars(namespace), *(said.values.keys() - said.weak.keys() if said else ())}
    if "dp" in weak and "dp" not in firm:
        _fits(groups, tp if divided else groups, namespace)
    if min(dp, tp) < 1 or not hasattr(namespace, "run"):
        return notes
    if divided:
        if tp > 1 and "dp" not in values:
            notes.append(f"--enable-dp-attention: is --dp {tp} where --dp is left out")
        elif tp > 1 and dp == 1:
            flag = "--attn-dp-size" if "dp" in weak else "--dp"
            notes.append(f"{flag} 1: one group of ranks divides attention by heads alone")
    elif (
        dp > 1
        and "enable_dp_attention" not in values
        and weak.get("ep") == 0
        and any("--enable-expert-parallel" in note for note in notes)
    ):
        namespace.tp, namespace.dp, namespace.enable_dp_attention = tp * dp, dp, True
        notes.append(
            f"--data-parallel-size {dp} --enable-expert-parallel: is --tp {tp * dp} --dp {dp} "
            "--enable-dp-attention here"
        )
    return notes


def _fits(groups: int, tp: int, namespace: Namespace) -> None:
    """Raises ConfigError, with the line of the file that says it, where ranks do not divide so."""
    if groups < 1:
        problem = "must be at least 1"
    elif tp > 0 and tp % groups:
        problem = f"--tp {tp} ranks do not divide into {groups} groups: give --tp {groups}"
    else:
        return
    said: FromFile | None = getattr(namespace, "config", None)
    filed = said is not None and "dp" not in getattr(namespace, "weak", {})
    place = f"--config {said.path}, line {said.lines['dp']}: " if said and filed else ""
    raise ConfigError(f"{place}--attn-dp-size {groups}: {problem}")
