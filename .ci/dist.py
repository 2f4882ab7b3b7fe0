"""Builds what a release consists of into a folder: the same bytes each time from the same files.

    SOURCE_DATE_EPOCH=0 python .ci/dist.py dist

The wheel is built from the source distribution, so nothing is missing in either. ``paceline-VERSION.cdx.json`` is an
SBOM (CycloneDX 1.6) of the required dependencies as they are installed. The build fails if the licence of one is
unknown or not among ``ALLOWED``.
"""

import gzip
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ALLOWED = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|MPL|Zlib|CC0|Unlicense|LGPL|BSL|NVIDIA")
"""Licences that a program under Apache 2.0 may depend on; NVIDIA's is that of the libraries of PyTorch for CUDA."""


def build(hook: str, source: Path, folder: Path) -> Path:
    """Run a hook of the build backend (PEP 517) in the sources; the file that it has written."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(folder)!r}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    return folder / ended.stdout.splitlines()[-1]


def repack(archive: Path, time: int) -> None:
    """Write an archive anew with sorted names, one time and no owner, which setuptools leaves to the machine."""
    with tarfile.open(archive) as given, tempfile.TemporaryFile() as made:
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for one in sorted(given.getmembers(), key=lambda member: member.name):
                one.uid, one.gid, one.uname, one.gname, one.mtime, one.pax_headers = 0, 0, "", "", time, {}
                one.mode = 0o755 if one.isdir() else 0o644
                tar.addfile(one, given.extractfile(one))
        made.seek(0)
        packed = gzip.compress(made.read(), mtime=time)
    archive.write_bytes(packed)


def required(name: str) -> set[str]:
    """The packages that one needs without extras, and those that they need."""
    found, waiting = set(), [name]
    while waiting:
        for text in importlib.metadata.requires(waiting.pop()) or []:
            one = Requirement(text)
            if one.name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
                found.add(one.name)
                waiting.append(one.name)
    return found


def licence(package: importlib.metadata.PackageMetadata) -> str:
    classifiers = [one.rpartition(" :: ")[2] for one in package.get_all("Classifier", []) if one.startswith("License")]
    first_line = (package.get("License") or "").strip().partition("\n")[0]
    return package.get("License-Expression") or ", ".join(classifiers) or first_line


def bill(version: str) -> dict[str, object]:
    """The SBOM, as far as pip knows the packages."""
    components = []
    for name in sorted(required("paceline"), key=str.lower):
        package = importlib.metadata.metadata(name)
        found = licence(package)
        if not all(ALLOWED.search(one) for one in re.split(r" AND | OR |, ", found)):
            raise SystemExit(f"{name} has the licence {found or 'unknown'!r}, which is not among those allowed.")
        key = re.sub(r"[-_.]+", "-", name).lower()
        components.append(
            {
                "type": "library",
                "name": name,
                "version": package["Version"],
                "purl": f"pkg:pypi/{key}@{package['Version']}",
                "licenses": [{"license": {"name": found}}],
            }
        )
    product = {"type": "library", "name": "paceline", "version": version, "purl": f"pkg:pypi/paceline@{version}"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": product},
        "components": components,
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    time = int(os.environ["SOURCE_DATE_EPOCH"])
    for left in ("build", "paceline.egg-info"):  # files of an earlier build would be packed, too
        shutil.rmtree(ROOT / left, ignore_errors=True)
    source = build("build_sdist", ROOT, folder)
    repack(source, time)
    with tempfile.TemporaryDirectory() as unpacked, tarfile.open(source) as archive:
        archive.extractall(unpacked, filter="data")
        wheel = build("build_wheel", next(Path(unpacked).iterdir()), folder)
    version = wheel.name.split("-")[1]
    (folder / f"paceline-{version}.cdx.json").write_text(json.dumps(bill(version), indent=1) + "\n")
    print(*sorted(str(path) for path in folder.iterdir()), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
