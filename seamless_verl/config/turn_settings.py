"""Settings of the advantage estimators that compare turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from seamless_verl.runtime.fields import Doc, NotNegative


@dataclass(frozen=True)
class TurnsConfig:
    """Advantages over turns: `algorithm.adv_estimator=hgpo`."""

    depth: Annotated[
        NotNegative,
        Doc(
            "how many observations before a turn's own are compared: HGPO's K. Turns of a prompt are compared where "
            "the last 1 to `depth` + 1 observations are equal; more of them weigh more"
        ),
    ] = 2
    discount: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Doc("a turn's return is its own reward + `discount` times the return of the next turn of its session"),
    ] = 0.95
