"""Which classes are the user's: what their objects hold is looked at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.system.user_code import is_user_class


class Wrapped:
    @torch.no_grad()  # its code is in torch
    def first(self) -> None:
        pass


def test_a_class_belongs_to_whoever_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "summary", lambda self: "", raising=False)
    assert is_user_class(Wrapped)
    assert is_user_class(type("Typed", (), {"__module__": "__main__"}))
    assert not any(map(is_user_class, (nn.Module, nn.Linear, dict, type)))
