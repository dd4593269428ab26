"""Transformers: LaconicTrainer(scheme=...) instead of Trainer(...)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from laconic.integrations import Either, attach_or_follow
from laconic.replicas import Follower
from laconic.scheme import AnyScheme

_FILE = "laconic.pt"  # in a checkpoint's folder


class LaconicMixin:
    """Before a Trainer among the bases of a class, lets it exchange under `scheme`, of gradients or of models.

    `options` go to attach() or follow(). A checkpoint, which rank 0 writes, holds the states of all ranks. Under a
    scheme of models all take the mean of their models before one is saved, and resume with rank 0's optimizer.
    """

    def __init__(
        self, *args: Any, scheme: AnyScheme | str, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.exchange = _Exchange(self, scheme, dict(options or {}))
        self.add_callback(self.exchange)  # type: ignore[attr-defined]

    @property
    def session(self) -> Either | None:
        """What attach() or follow() returned, once training began."""
        return self.exchange.session

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ever, and continue from what all ranks had kept."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)  # type: ignore[attr-defined]
        self.exchange.resumes_from = Path(folder) if folder else None
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]


class _Exchange(TrainerCallback):
    """Begins once the model is wrapped, and keeps a file beside what the trainer saves."""

    def __init__(self, trainer: Any, scheme: AnyScheme | str, options: dict[str, Any]) -> None:
        self.session: Either | None = None
        self.resumes_from: Path | None = None
        self._trainer = trainer
        self._wrapped: Any = None
        self._scheme = scheme
        self._options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the model as it is wrapped now, unless it is as before."""
        trainer = self._trainer
        if self.session is None or trainer.model_wrapped is not self._wrapped:
            self._wrapped = trainer.model_wrapped
            scaler = trainer.accelerator.scaler
            self.session = attach_or_follow(
                self._wrapped, trainer.optimizer, self._scheme, self.session, grad_scaler=scaler, **self._options
            )
        if self.resumes_from is not None:
            file = self.resumes_from / _FILE
            has_state = args.process_index == 0 and file.exists()
            self.session.scatter_state(torch.load(file, weights_only=True) if has_state else None)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let a model that follows others do so."""
        if isinstance(self.session, Follower):
            self.session.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All ranks have the model alike that is saved next."""
        if control.should_save and isinstance(self.session, Follower):
            self.session.average_()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the states of all ranks beside the trainer's own."""
        if self.session is None or args.save_only_model:
            return
        states = self.session.gather_state()
        if states is not None:
            torch.save(states, Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / _FILE)


class LaconicTrainer(LaconicMixin, Trainer):
    """transformers.Trainer that exchanges under a scheme."""
