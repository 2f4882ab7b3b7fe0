"""Secure aggregation: a sum of vectors in which masks hide each of them (Bonawitz et al. 2017, CCS, figure 4).

::

    keys       a party draws two X25519 key pairs and the seed of its own mask, and tells all its public keys
    shares     it sends each party a share of its seed and of its mask key, encrypted for that party (Shamir)
    masked     x + own mask + masks with later parties - masks with earlier parties      ── modulo 2**64 ──► sum
    reveal     of each party whose vector is in the sum: shares of its seed; of each other one: of its mask key
    unmask     sum - own masks - masks with parties whose vector is missing

The masks between two parties cancel in the sum. Whole numbers are added modulo 2**64, so the sum is exact, and a masked
vector is uniformly distributed for a reader without the keys. A party reveals only one of the two shares, so a late
vector stays hidden. Parties are honest but curious: fewer than ``threshold`` of them learn nothing from
what all of them have seen, except the sum.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from paceline.comm.values import sendable
from paceline.strategies.local.masking import shamir

Vector = npt.NDArray[np.int64]

_BYTES = 32  # of a seed and of a private key
_SHARE_BYTES = 66  # of a number below the prime
_NONCE = bytes(12)  # each key encrypts one message


@sendable
class PublicKeys(NamedTuple):
    """Public keys of a party in one round."""

    shares: bytes  # for the encryption of shares to it
    masks: bytes  # for masks


class Party:
    """Party in one sum.

    Args:
        number: number of the party, from 0.
        threshold: number of parties whose shares restore a secret.
    """

    def __init__(self, number: int, threshold: int) -> None:
        self._number, self._threshold = number, threshold
        self._for_shares, self._for_masks = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = os.urandom(_BYTES)
        self._keys: Mapping[int, PublicKeys] = {}
        self._revealed = False

    @property
    def keys(self) -> PublicKeys:
        public = (one.public_key().public_bytes_raw() for one in (self._for_shares, self._for_masks))
        return PublicKeys(*public)

    def share(self, keys: Mapping[int, PublicKeys]) -> dict[int, bytes]:
        """Return encrypted shares of the two secrets for each party of the sum, given the keys of all."""
        self._keys = keys
        points = [number + 1 for number in keys]
        seed, key = (
            shamir.split(int.from_bytes(secret, "big"), points, self._threshold)
            for secret in (self._seed, self._for_masks.private_bytes_raw())
        )
        return {
            number: self._cipher(number, self._number, number).encrypt(
                _NONCE, b"".join(one[number + 1].to_bytes(_SHARE_BYTES, "big") for one in (seed, key)), None
            )
            for number in keys
        }

    def mask(self, vector: Vector) -> Vector:
        """Return the vector with all masks."""
        masked = vector + _stream(self._seed, len(vector))
        for number, keys in self._keys.items():
            if number != self._number:
                masked += _between(self._for_masks, self._number, keys.masks, number, len(vector))
        return masked

    def reveal(self, sealed: Mapping[int, bytes], delivered: Collection[int]) -> dict[int, int]:
        """Return a share of one secret of each party.

        Args:
            sealed: shares that each party has encrypted for this one.
            delivered: parties whose masked vectors are in the sum.
        """
        assert not self._revealed, "shares of both secrets of a party would reveal its vector"
        self._revealed, shares = True, {}
        for number, text in sealed.items():
            opened = self._cipher(number, number, self._number).decrypt(_NONCE, text, None)
            seed, key = opened[:_SHARE_BYTES], opened[_SHARE_BYTES:]
            shares[number] = int.from_bytes(seed if number in delivered else key, "big")
        return shares

    def _cipher(self, other: int, sender: int, receiver: int) -> ChaCha20Poly1305:
        shared = self._for_shares.exchange(X25519PublicKey.from_public_bytes(self._keys[other].shares))
        return ChaCha20Poly1305(_derived(shared, f"shares of {sender} for {receiver}"))


def unmask(
    total: Vector, keys: Mapping[int, PublicKeys], revealed: Mapping[int, Mapping[int, int]], threshold: int
) -> Vector:
    """Return the sum of the delivered vectors, given the sum of the masked ones.

    Args:
        keys: public keys of all parties that have sent shares.
        revealed: revealed shares of at least ``threshold`` parties whose vectors were delivered.
    """
    helpers = sorted(revealed)[:threshold]
    total = total.copy()
    for number, public in keys.items():
        secret = shamir.join({helper + 1: revealed[helper][number] for helper in helpers}).to_bytes(_BYTES, "big")
        if number in revealed:
            total -= _stream(secret, len(total))
            continue
        private = X25519PrivateKey.from_private_bytes(secret)
        assert private.public_key().public_bytes_raw() == public.masks, f"the shares of party {number} do not fit"
        for other in revealed:  # the mask of a missing vector is the negative of the mask of the present vector
            total += _between(private, number, keys[other].masks, other, len(total))
    return total


def _between(own: X25519PrivateKey, number: int, public: bytes, other: int, length: int) -> Vector:
    """Return the mask that a party adds to its vector, and another party subtracts."""
    low, high = sorted((number, other))
    shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    mask = _stream(_derived(shared, f"mask of {low} and {high}"), length)
    return mask if number < other else -mask


def _derived(shared: bytes, use: str) -> bytes:
    return bytes(HKDF(algorithm=SHA256(), length=_BYTES, salt=None, info=f"paceline {use}".encode()).derive(shared))


def _stream(key: bytes, length: int) -> Vector:
    """Return pseudorandom numbers from a key that is used once."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(8 * length)), np.int64)
