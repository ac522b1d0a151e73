"""Finished pieces of a recording, kept beside the output file so that a killed run can go on."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

from pydantic import TypeAdapter

from gpu_backend.greedy import TargetOutput
from gpu_backend.job_folder import claim_folder
from traces.schema import PositionArrays
from traces.store import write_whole

_OUTPUTS = TypeAdapter(list[TargetOutput])


class PartStore:
    """A folder ``OUT.parts`` of finished pieces, each of which appears whole or not at all.

    - *Outputs*: what the target said to one batch of prompts, as JSON.
    - *Requests*: the arrays of one recorded request, as safetensors.

    Args:
        out: the recording that the pieces are for.
        job: everything that decides their content; pieces of another job are refused.
    """

    def __init__(self, out: Path, job: dict[str, object]) -> None:
        """Keep the folder's name and the job; :meth:`open` touches the disk."""
        self.folder = out.with_name(out.name + ".parts")
        self._job = job

    def open(self) -> None:
        """Create the folder, or check that its pieces belong to this job.

        Raises:
            InputError: the folder cannot be made, or its pieces belong to another job.
        """
        claim_folder(
            self.folder,
            self._job,
            "parts of a recording with other models, prompts or settings",
            "repeat that command, or remove the folder, or give another --out",
        )

    def load_outputs(self, turn: int, first: int) -> list[TargetOutput] | None:
        """Outputs of the batch of a turn that starts at prompt ``first``; None if missing."""
        path = self._outputs_path(turn, first)
        return _OUTPUTS.validate_json(path.read_bytes()) if path.exists() else None

    def save_outputs(self, turn: int, first: int, outputs: list[TargetOutput]) -> None:
        """Keep the outputs of one batch of prompts."""
        write_whole(self._outputs_path(turn, first), _OUTPUTS.dump_json(outputs))

    def has_request(self, request: int) -> bool:
        """Whether a request is recorded."""
        return self._request_path(request).exists()

    def load_request(self, request: int) -> PositionArrays:
        """Arrays of one recorded request."""
        from safetensors.numpy import load_file

        return PositionArrays(**load_file(self._request_path(request)))

    def save_request(self, request: int, arrays: PositionArrays) -> None:
        """Keep the arrays of one request."""
        import numpy as np
        from safetensors.numpy import save

        # safetensors stores the memory as it lies, which garbles an array in Fortran order.
        named = {f.name: np.ascontiguousarray(getattr(arrays, f.name)) for f in fields(arrays)}
        write_whole(self._request_path(request), save(named))

    def remove(self) -> None:
        """Remove all pieces, once the recording itself is written."""
        shutil.rmtree(self.folder)

    def _outputs_path(self, turn: int, first: int) -> Path:
        return self.folder / f"outputs-{turn}-{first:04d}.json"

    def _request_path(self, request: int) -> Path:
        return self.folder / f"request-{request:04d}.safetensors"
