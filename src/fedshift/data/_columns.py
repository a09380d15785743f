"""What columns of a table mean: the roles they can play, the names they usually have, and ids that look like groups."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ROLES: dict[str, tuple[str, ...]] = {  # a role and the column names it is looked for under
    "image": (  # encoded pictures, or paths of them
        *("image", "img", "file_name", "file", "path", "file_path", "image_path", "image_name", "image_file"),
        *("image_id", "img_path"),
    ),
    "label": ("label", "labels", "fine_label", "character", "class", "target"),
    "client": ("domain",),
    "user": ("writer_id", "user_id"),
    "super": ("coarse_label",),
    "split": ("split",),
    "group": (  # the widest first: a patient has several lesions; "Patient ID" and "PatientID" are found too
        *("patient", "patient_id", "subject", "subject_id", "person", "person_id", "participant", "participant_id"),
        *("mrn", "case", "case_id", "study", "study_id", "exam", "exam_id", "specimen", "specimen_id"),
        *("lesion", "lesion_id", "slide", "slide_id"),
    ),
}
_ID = re.compile(r"(?:^|[^a-zA-Z])(?:id|uid|key|nr|no|number|code)s?$|[a-z](?:ID|UID)$", re.IGNORECASE)


def usual(role: str, columns: Iterable[str], taken: Iterable[str] = ()) -> str | None:
    """The column that plays a role by its name, unless it plays another one; groups and images however they are spelt.

    >>> usual("client", ["image", "domain"]), usual("group", ["lesion_id", "PatientID"]), usual("group", ["age"])
    ('domain', 'PatientID', None)
    >>> usual("image", ["label", "File Name"])
    'File Name'
    """
    spelt: Callable[[str], str] = _plain if role in ("image", "group") else str
    free = {spelt(name): name for name in columns if name not in set(taken)}
    wanted = [spelt(name) for name in ROLES[role]]
    return next((free[name] for name in wanted if name in free), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def optional(columns: Mapping[str, str] | None) -> bool:
    """Whether optional roles are looked for: not where the user says what columns mean. Naming a group says little."""
    return not set(columns or ()) - {"group"}


def text_of(value: Any) -> str:
    """A cell as text; what is missing is empty, and numbers that went through a float are whole again.

    >>> text_of(12.0), text_of(None), text_of(float("nan")), text_of(" P7 "), text_of(True), text_of(0.5)
    ('12', '', '', 'P7', 'true', '0.5')
    """
    if value is None or value != value:  # not a number
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def group_hint(name: str, texts: Sequence[str], labels: Sequence[Any]) -> str:
    """A sentence on an unused column whose values look like ids of groups; empty if they do not.

    >>> group_hint("scan_id", [str(i // 3) for i in range(90)], [0, 1] * 45)[:68]
    'column "scan_id" looks like the id of a group (30 values, 90 images)'
    >>> group_hint("age", [str(i % 7) for i in range(90)], [0, 1] * 45)
    ''
    """
    counts = Counter(text for text in texts if text)
    values, images = len(counts), sum(counts.values())
    if values < 2 or values == images:
        return ""
    mean = images / values
    by_name = bool(_ID.search(name)) and (values >= 20 or mean <= 100)
    by_values = values >= 10 and 1.2 <= mean <= 50 and not all(_is_number(text) for text in counts)
    pairs = len({(text, label) for text, label in zip(texts, labels, strict=True) if text})
    if not (by_name or by_values) or pairs == values == len(set(labels)):  # the last: another name of the class
        return ""
    return (
        f'column "{name}" looks like the id of a group ({values:,} values, {images:,} images) but is not used, so one '
        f'group may be both trained and tested on: set group = "{name}" in [data] columns (-c data.columns.group={name}), '
        'or group = "" if it is none'
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
