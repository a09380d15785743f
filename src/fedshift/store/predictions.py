"""Probabilities of every test image, a Parquet file for each adapter: ``predictions/LABEL.parquet``.

One line for each image of each stream: which model, stream, population and client, the image's id, its group (patient)
and attributes (scanner, sex) if the data have such, its class, and ``log-probability of CLASS`` for every class.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedshift.errors import UserError
from fedshift.measures.predictions import Floats, Integers, Predictions
from fedshift.store.files import Damaged, read_bytes
from fedshift.store.metric import Metric
from fedshift.store.seal import BROKEN, SEAL

PROBABILITY = "log-probability of "
ATTRIBUTE = "attribute "
WHERE = ("model", "stream", "population", "client")


@dataclass(frozen=True, eq=False)
class ClientPredictions:
    """One client's predictions along one stream."""

    metric: Metric
    client: str
    ids: Integers  # of images
    groups: Integers  # which images belong together; one that is alone has a number of its own
    predictions: Predictions
    attributes: Mapping[str, Sequence[str]]  # by name of a column, a value for each image


def predictions_file(folder: Path, label: str) -> Path:
    """Where an adapter's are."""
    return folder / "predictions" / f"{label}.parquet"


def packed(number: int, parts: Sequence[ClientPredictions], classes: Sequence[str]) -> bytes:
    """The file of all of these, which are of one round; ``classes`` has a name for every logit."""
    names = [*classes]
    columns: dict[str, Any] = {}
    for k, key in enumerate(WHERE):
        values = [(*part.metric[:3], part.client)[k] for part in parts]
        lengths = [len(part.ids) for part in parts]
        columns[key] = pa.array(np.repeat(np.array(values, dtype=object), lengths), pa.string()).dictionary_encode()
    columns["image"] = np.concatenate([part.ids for part in parts])
    columns["group"] = np.concatenate([part.groups for part in parts])
    for name in dict.fromkeys(name for part in parts for name in part.attributes):
        values = [value for part in parts for value in part.attributes.get(name, [""] * len(part.ids))]
        columns[ATTRIBUTE + name] = pa.array(values, pa.string()).dictionary_encode()
    labels = np.concatenate([part.predictions.labels for part in parts])
    columns["class"] = pa.array(np.array(names, dtype=object)[labels], pa.string()).dictionary_encode()
    logs = np.concatenate([part.predictions.log_probabilities for part in parts])
    columns |= {PROBABILITY + name: logs[:, k] for k, name in enumerate(names)}
    table = pa.table(columns)
    table = table.replace_schema_metadata({"round": str(number), SEAL: _seal(table)})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read_predictions(folder: Path, label: str) -> list[ClientPredictions]:
    """All that is kept of an adapter."""
    path = predictions_file(folder, label)
    if not path.exists():
        raise UserError(
            f"{folder} keeps no predictions of adapter {label!r}: repeat its fedshift run with "
            "-c evaluate.predictions=true to add them, finished rounds are not run again"
        )
    content = read_bytes(path)
    try:
        table = pq.read_table(pa.BufferReader(content))
        seal = (table.schema.metadata or {}).get(SEAL.encode(), b"").decode()
        parts = list(_parts(table))
        if seal and seal != _seal(table):
            raise Damaged(path, BROKEN)
    except (OSError, pa.ArrowException) as error:
        raise Damaged(path, str(error).partition("\n")[0]) from None
    except (LookupError, TypeError, ValueError) as error:
        raise Damaged(path, f"it has another shape: {error}") from None
    return parts


def _seal(table: Any) -> str:
    """A digest of what a table holds, however it is compressed."""
    digest = hashlib.blake2b(digest_size=8)
    for name in table.column_names:
        column = table[name].combine_chunks()
        digest.update(name.encode())
        if pa.types.is_dictionary(column.type):
            column = pc.dictionary_encode(column.cast(pa.string()))  # in the order of their first use
            digest.update("\0".join(map(str, column.dictionary.to_pylist())).encode())
            column = column.indices
        digest.update(np.ascontiguousarray(column.to_numpy(zero_copy_only=False)).data)
    return digest.hexdigest()


def _parts(table: Any) -> Sequence[ClientPredictions]:
    names = [name.removeprefix(PROBABILITY) for name in table.column_names if name.startswith(PROBABILITY)]
    attributes = [name for name in table.column_names if name.startswith(ATTRIBUTE)]
    logs: Floats = np.stack([table[PROBABILITY + name].to_numpy() for name in names], 1)
    labels = pc.index_in(table["class"].cast(pa.string()), pa.array(names)).to_numpy().astype(np.int64)
    where = [table[key].combine_chunks().cast(pa.string()).dictionary_encode() for key in WHERE]
    ids, groups = table["image"].to_numpy(), table["group"].to_numpy()
    values = {name.removeprefix(ATTRIBUTE): table[name].cast(pa.string()).to_pylist() for name in attributes}
    codes = np.stack([column.indices.to_numpy() for column in where], 1)  # [samples, 4]
    changes = np.flatnonzero((codes[1:] != codes[:-1]).any(1)) + 1
    starts = [0, *changes.tolist()] if len(codes) else []
    return [
        ClientPredictions(
            Metric(*named[:3]),
            named[3],
            ids[start:end],
            groups[start:end],
            Predictions(logs[start:end], labels[start:end]),
            {name: column[start:end] for name, column in values.items()},
        )
        for start, end in zip(starts, [*starts[1:], len(codes)], strict=True)
        for named in [[column.dictionary[code].as_py() for column, code in zip(where, codes[start], strict=True)]]
    ]
