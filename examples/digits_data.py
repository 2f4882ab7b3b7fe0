"""Pictures of handwritten digits to train on and to test with: MNIST, or the small ones of scikit-learn."""

import gzip
import struct
import sys
from pathlib import Path

import torch


class Digits(torch.utils.data.Dataset):
    """Pairs (picture, label); a picture is a tensor of shape [1, side, side] with values from 0 to 1.

    With ``shift`` a picture moves by at most this many pixels, differently each time it is read. The random numbers are
    torch's; a Paceline session seeds them for each sample and epoch, so they do not depend on the worker.
    """

    def __init__(self, pictures, labels, shift=0):
        self.side = pictures.shape[-1]
        self.shift = shift
        # With a margin around the picture, a moved picture is a plain cut.
        self.pictures = torch.nn.functional.pad(pictures[:, None], [shift] * 4)
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = self.pictures[index]
        if self.shift:
            top, left = torch.randint(2 * self.shift + 1, (2,)).tolist()
            picture = picture[:, top : top + self.side, left : left + self.side]
        return picture, self.labels[index]


def read_digits(paths, shift=0):
    """The training set, moved by ``shift``, and the test set.

    ``paths`` is empty for scikit-learn's digits, or a folder with MNIST's files, or one file of pictures and
    one of labels. Files may be gzipped. Where only one pair of them is there, its last fifth is the test set.
    """
    if not paths:
        pictures, labels = small_digits()
    elif len(paths) == 2:
        pictures, labels = read_pair(*map(Path, paths))
    elif len(paths) == 1:
        test = read_pair(*files_of(Path(paths[0]), "t10k"))
        if has_files(Path(paths[0]), "train"):
            return Digits(*read_pair(*files_of(Path(paths[0]), "train")), shift), Digits(*test)
        pictures, labels = test
    else:
        sys.exit("Give a folder with MNIST's files, or a file of pictures and a file of labels.")
    cut = len(labels) * 4 // 5
    return Digits(pictures[:cut], labels[:cut], shift), Digits(pictures[cut:], labels[cut:])


def small_digits():
    """1797 pictures of 8 x 8 pixels, mixed, because they are ordered by writer."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(pictures, dtype=torch.float32).reshape(-1, 8, 8) / 16
    return pictures[order], torch.tensor(labels)[order]


def read_pair(pictures, labels):
    """The pictures and the labels in two files."""
    return read_idx(pictures).float() / 255, read_idx(labels).long()


def read_idx(path):
    """The array in a file of MNIST's format: its sizes as big-endian numbers, then its bytes."""
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    if data[:3] != b"\0\0\x08":
        sys.exit(f"{path} is not an IDX file of bytes.")
    dims = data[3]
    sizes = struct.unpack_from(f">{dims}I", data, 4)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=4 + 4 * dims).reshape(sizes)


def files_of(folder, part):
    """The file of pictures and the file of labels of "train" or "t10k"."""
    found = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        plain, zipped = folder / name, folder / f"{name}.gz"
        if not plain.exists() and not zipped.exists():
            sys.exit(f"There is no {zipped.name}, zipped or not, in {folder}.")
        found.append(plain if plain.exists() else zipped)
    return found


def has_files(folder, part):
    """Whether the folder has files of "train" or "t10k"."""
    return any(folder.glob(f"{part}-images-idx3-ubyte*"))
