"""Packets as Flower's records: a slot is an array record, everything else one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedshift.deploy.packet import Packet
from fedshift.errors import UserError

HEADER, TREE = "packet", "tree/"
# Flower knows three types of messages; what comes after the dot is ours
TYPES: Mapping[str, str] = {
    "hello": "query.hello",
    "train": "train.train",
    "share": "train.share",
    "mask": "train.mask",
    "unmask": "train.unmask",
    "settle": "train.settle",
    "calibrate": "evaluate.calibrate",
    "evaluate": "evaluate.evaluate",
    "serve": "query.serve",
}


def to_records(packet: Packet) -> RecordDict:
    """A packet as Flower's records: a slot is an array record, everything else a line of JSON."""
    header = ConfigRecord({"header": packet.header()})
    arrays = {f"{TREE}{slot}": ArrayRecord(dict(leaves)) for slot, leaves in packet.arrays().items()}
    return RecordDict({HEADER: header, **arrays})


def from_records(records: RecordDict) -> Packet:
    """The packet again; a sentence if it is none."""
    try:
        header = records.config_records[HEADER]["header"]
        arrays = {
            key.removeprefix(TREE): dict(record.to_torch_state_dict()) for key, record in records.array_records.items()
        }
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"this is no packet of fedshift ({error!r})") from None
    return Packet.read(str(header), arrays)
