"""Small files in exactly the layouts the presets name: our Parquet files, the hub's, and image folders.

Pictures are noise over a tint of their class. Every one is different, so no two are duplicates.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
OFFICE = ("backpack", "bike", "calculator", "headphones", "keyboard", "laptop", "monitor", "mouse", "mug", "projector")
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
DOMAINNET = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)
DOMAINNET_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
OFFICE_DOMAINS = ("amazon", "caltech10", "dslr", "webcam")
CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
ANIMALS = tuple(f"animal-{i}" for i in range(10))
WORDNET = tuple(f"n{1440764 + 7 * i:08d}" for i in range(86))


@dataclass
class Painter:
    """Makes pictures, each different from all before."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def picture(self, label: int, side: int, grey: bool = False) -> Image.Image:
        shape = (side, side) if grey else (side, side, 3)
        noise = self.rng.integers(0, 128, shape)
        tint = (label * 37 % 128) if grey else np.array([label * 37 % 128, label * 91 % 128, label * 13 % 128])
        return Image.fromarray((noise + tint).astype(np.uint8))

    def encoded(self, label: int, side: int, grey: bool = False) -> bytes:
        buffer = io.BytesIO()
        self.picture(label, side, grey).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()


def write_parquet(
    path: Path,
    images: Sequence[bytes],
    columns: Mapping[str, Sequence[object]],
    classes: Mapping[str, Sequence[str]],
    image: str = "image",
    paths: Sequence[str] | None = None,
) -> None:
    """One Parquet file as Hugging Face writes it: a struct of bytes and path, the features in the schema's metadata."""
    names = paths or [f"{i:05d}.png" for i in range(len(images))]
    pictures = pa.array([{"bytes": data, "path": name} for data, name in zip(images, names, strict=True)])
    table = pa.table({image: pictures, **{name: list(values) for name, values in columns.items()}})
    features: dict[str, object] = {image: {"_type": "Image"}}
    for name in columns:
        if name in classes:
            features[name] = {"names": list(classes[name]), "_type": "ClassLabel"}
        else:
            features[name] = {"dtype": str(table.schema.field(name).type), "_type": "Value"}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path)


def ours(
    painter: Painter,
    path: Path,
    classes: Sequence[str],
    domains: Iterable[str],
    train: int,
    test: int,
    side: int,
    grey: bool = False,
) -> None:
    """Columns image, label, domain, split: so many of each split for every domain, classes in turn."""
    rows = [(d, s, i % len(classes)) for d in domains for s, n in (("train", train), ("test", test)) for i in range(n)]
    # two crops of every photograph, as SVHN has them: photograph_position
    paths = [f"{domain}/{split}/{i // 2}_{i % 2}.png" for i, (domain, split, _) in enumerate(rows)]
    write_parquet(
        path,
        [painter.encoded(label, side, grey) for _, _, label in rows],
        {"label": [r[2] for r in rows], "domain": [r[0] for r in rows], "split": [r[1] for r in rows]},
        {"label": classes},
        paths=paths,
    )


def hub_split(
    painter: Painter, folder: Path, classes: Sequence[str], counts: Mapping[str, int], side: int, grey: bool, image: str
) -> None:
    """A hub repository with one Parquet file for each split and no split column."""
    for split, count in counts.items():
        labels = [i % len(classes) for i in range(count)]
        pictures = [painter.encoded(label, side, grey) for label in labels]
        write_parquet(
            folder / f"{split}-00000-of-00001.parquet", pictures, {"label": labels}, {"label": classes}, image=image
        )


def folders(
    painter: Painter, root: Path, domains: Sequence[str], classes: Sequence[str], each: int, side: int, suffix: str
) -> None:
    """Pictures in domain/class/, or in class/ where there are no domains."""
    for domain in domains or ("",):
        for label, name in enumerate(classes):
            place = root / domain / name
            place.mkdir(parents=True, exist_ok=True)
            for i in range(each):
                painter.picture(label, side).save(place / f"{domain or name}_{i:04d}.{suffix}")


def cifar(painter: Painter, root: Path) -> None:
    """CIFAR-10 as our files and as the hub's, and natural-shift sets as Parquet and as folders."""
    ours(painter, root / "cifar10-train-0.parquet", CIFAR10, ["cifar10"], 300, 0, 32)
    ours(painter, root / "cifar10-test.parquet", CIFAR10, ["cifar10"], 0, 100, 32)
    hub_split(painter, root / "cifar10/plain_text", CIFAR10, {"train": 300, "test": 100}, 32, False, "img")
    ours(painter, root / "cifar10-natural.parquet", CIFAR10, ["stl10"], 0, 300, 32)
    folders(painter, root / "cifar10.1", (), CIFAR10, 20, 32, "png")


def cifar100(painter: Painter, root: Path) -> None:
    """CIFAR-100 of the hub: img, fine_label, coarse_label; 20 superclasses of five fine classes."""
    names = {"fine_label": [f"fine-{i}" for i in range(100)], "coarse_label": [f"coarse-{i}" for i in range(20)]}
    for split, each in (("train", 5), ("test", 1)):
        fine = [i % 100 for i in range(100 * each)]
        pictures = [painter.encoded(label, 32) for label in fine]
        columns = {"fine_label": fine, "coarse_label": [label % 20 for label in fine]}
        write_parquet(root / f"cifar100/cifar100/{split}-00000-of-00001.parquet", pictures, columns, names, image="img")


def femnist(painter: Painter, root: Path) -> None:
    """FEMNIST of the hub: image, writer_id, hsf_id, character; one file, which is called train."""
    rows = [(f"f{writer:04d}_14", (7 * writer + i) % 62) for writer in range(10) for i in range(62)]
    write_parquet(
        root / "femnist/data/train-00000-of-00001.parquet",
        [painter.encoded(label, 28, grey=True) for _, label in rows],
        {"writer_id": [r[0] for r in rows], "hsf_id": [0] * len(rows), "character": [r[1] for r in rows]},
        {"character": CHARACTERS},
    )


def camelyon17(painter: Painter, root: Path) -> None:
    """Camelyon17 of WILDS as Parquet: image, label, center, slide; ten slides in each of five hospitals, three parts."""
    rows = [(center, 10 * center + slide, i % 2) for center in range(5) for slide in range(10) for i in range(6)]
    for part, name in enumerate(("train", "validation", "test")):
        chosen = rows[part::3]
        write_parquet(
            root / f"camelyon17/{name}-00000-of-00001.parquet",
            [painter.encoded(label, 32) for _, _, label in chosen],
            {"label": [r[2] for r in chosen], "center": [r[0] for r in chosen], "slide": [r[1] for r in chosen]},
            {"label": ("normal", "tumor")},
        )


def domainnet(painter: Painter, root: Path) -> None:
    """Ten classes of DomainNet as folders, and as a Parquet file with the hub's columns."""
    folders(painter, root / "domainnet10", DOMAINNET_DOMAINS, DOMAINNET, 6, 40, "jpg")
    rows = [(domain, label) for domain in range(6) for label in range(10) for _ in range(3)]
    write_parquet(
        root / "domainnet10.parquet",
        [painter.encoded(label, 40) for _, label in rows],
        {
            "domain": [r[0] for r in rows],
            "label": [r[1] for r in rows],
            "image_path": [f"{d}/{c}.jpg" for d, c in rows],
        },
        {"domain": DOMAINNET_DOMAINS, "label": DOMAINNET},
    )


def pacs(painter: Painter, root: Path) -> None:
    """PACS as our file, and as the hub's: image, domain, label, one file called train."""
    ours(painter, root / "pacs.parquet", PACS, PACS_DOMAINS, 70, 20, 48)
    rows = [(domain, i % 7) for domain in PACS_DOMAINS for i in range(28)]
    write_parquet(
        root / "pacs/data/train-00000-of-00001.parquet",
        [painter.encoded(label, 48) for _, label in rows],
        {"domain": [r[0] for r in rows], "label": [r[1] for r in rows]},
        {"label": PACS},
    )


def write_all(root: Path) -> None:
    """Everything the presets ask for."""
    painter = Painter()
    cifar(painter, root)
    cifar100(painter, root)
    femnist(painter, root)
    camelyon17(painter, root)
    domainnet(painter, root)
    pacs(painter, root)
    ours(painter, root / "digits.parquet", DIGITS, ["mnist", "mnist_m", "svhn", "usps"], 60, 20, 28)
    ours(painter, root / "digits-synfont.parquet", DIGITS, ["synfont"], 40, 10, 32)
    ours(painter, root / "office_caltech10.parquet", OFFICE, OFFICE_DOMAINS, 50, 20, 40)
    ours(painter, root / "fashion_mnist.parquet", FASHION, ["fashion_mnist"], 200, 40, 28, grey=True)
    writers = [f"hsf{series}_{writer:04d}" for series in (0, 4) for writer in range(25)]
    ours(painter, root / "writers.parquet", DIGITS, writers, 16, 4, 28, grey=True)
    hub_split(painter, root / "mnist/mnist", DIGITS, {"train": 300, "test": 60}, 28, True, "image")
    folders(painter, root / "iwildcam10", [f"camera-{i}" for i in range(10)], ANIMALS, 2, 40, "jpg")
    folders(painter, root / "imagenet32", (), WORDNET, 5, 32, "png")
    for shift in ("a", "r", "v2"):
        folders(painter, root / f"imagenet-{shift}", (), WORDNET, 2, 48, "jpg")
