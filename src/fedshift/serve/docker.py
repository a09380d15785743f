"""A folder from which Docker builds an image that serves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import fedshift
from fedshift.errors import UserError
from fedshift.runs.new_folder import new_folder
from fedshift.serve.service import Service

DOCKERFILE = """\
FROM python:3.12-slim
RUN pip install --no-cache-dir "fedshift[serve,dicom]=={version}"
RUN useradd --create-home --uid 10001 fedshift && install -d -o fedshift /serving
COPY artefacts /artefacts
USER fedshift
VOLUME /serving
EXPOSE 8080
HEALTHCHECK CMD ["python", "-c", {check}]
ENTRYPOINT {command}
"""
CHECK = (  # its own certificate need not name localhost
    "import ssl, urllib.request as r; "
    "r.urlopen('https://localhost:8080/health', context=ssl._create_unverified_context())"
)
SECRETS = {"--token-file": "token", "--certificate": "certificate.pem", "--key": "key.pem"}


def write_image(
    folder: Path, artefacts: Sequence[Path], services: Sequence[Service], adapter: str, options: Sequence[str]
) -> list[str]:
    """A new folder with a Dockerfile and copies of the artefacts; how to go on, in lines for people."""
    for link in (path for source in artefacts for path in (source, *source.rglob("*")) if path.is_symlink()):
        raise UserError(f"{link} is a link, and what it leads to would be in the image: put a copy in its place")
    with new_folder(folder) as place:
        for source, service in zip(artefacts, services, strict=True):
            shutil.copytree(source, place / "artefacts" / service.name)
        (place / "Dockerfile").write_text(dockerfile(adapter, options), encoding="utf-8")
    secrets = " ".join(f"-v $PWD/{name}:/run/secrets/{name}:ro" for name in SECRETS.values())
    return [
        f"Written: {folder / 'Dockerfile'} and {len(artefacts)} artefacts",
        f"docker build -t my-model {folder}",
        f"docker run -p 8080:8080 -v serving:/serving {secrets} my-model",
    ]


def dockerfile(adapter: str, options: Sequence[str]) -> str:
    """The file; the token, the certificate and the key come as secrets when it runs.

    >>> print(dockerfile("t3a", [])[:21])
    FROM python:3.12-slim
    """
    secrets = [word for option, name in SECRETS.items() for word in (option, f"/run/secrets/{name}")]
    chosen = [*(["--adapter", adapter] if adapter else []), *(word for one in options for word in ("-c", one))]
    command = ["fedshift", "serve", "/artefacts", "--host", "0.0.0.0", "--state", "/serving", *secrets, *chosen]
    return DOCKERFILE.format(version=fedshift.__version__, check=json.dumps(CHECK), command=json.dumps(command))
