"""Lightning: Trainer(strategy=LaconicStrategy(scheme))."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from laconic.errors import SchemeError
from laconic.integrations import Either, attach_or_follow
from laconic.replicas import Follower
from laconic.scheme import AnyScheme

_KEY = "laconic"  # in a checkpoint


class LaconicStrategy(DDPStrategy):
    """DDPStrategy that exchanges under a scheme, of gradients or of models, on CPU too.

    `options` go to attach() or follow(), all others to DDPStrategy. Checkpoints, which rank 0 writes, hold the states
    of all ranks. Under a scheme of models all take the mean of their models before one is saved, and resume with rank
    0's optimizer.
    """

    def __init__(self, scheme: AnyScheme | str, *, options: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self.session: Either | None = None  # while it fits, and after
        self._scheme = scheme
        self._options = dict(options or {})
        self._saved: Sequence[Mapping[str, Any]] | None = None

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model, and let it exchange."""
        super().setup(trainer)
        saved, self._saved = self._saved, None
        if trainer.state.fn != TrainerFn.FITTING or self.model is None:
            return
        if not self.optimizers:
            raise SchemeError("there is no optimizer; return one from the module's configure_optimizers()")
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.session = attach_or_follow(
            self.model, self.optimizers[0], self._scheme, self.session, grad_scaler=scaler, **self._options
        )
        if isinstance(self.session, Follower) and len(self.optimizers) > 1:
            raise SchemeError(f"there are {len(self.optimizers)} optimizers; a model that follows others has one")
        if saved is not None:
            self.session.scatter_state(saved)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, and let a model that follows others do so."""
        result = super().optimizer_step(optimizer, *args, **kwargs)
        if isinstance(self.session, Follower):
            self.session.step()
        return result

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's, which all ranks have alike."""
        if isinstance(self.session, Follower):
            self.session.average_()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save it with the states of all ranks, unless it is of weights alone."""
        if self.session is not None and "optimizer_states" in checkpoint:
            checkpoint[_KEY] = self.session.gather_state()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The checkpoint; what is ours is needed when the model is wrapped."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._saved = checkpoint.get(_KEY)
        return checkpoint
