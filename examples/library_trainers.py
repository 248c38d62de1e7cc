"""Hugging Face's `Trainer` and Lightning's as best effort: one callback each, nothing else changes.

python examples/library_trainers.py transformers
python examples/library_trainers.py lightning
"""

import argparse
from typing import Any

import cudasched
import cudasched.torch
import torch
from torch import Tensor, nn


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixty-four examples of nothing."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"x": torch.full((16,), float(place)), "labels": torch.zeros(16)}


def with_transformers() -> None:
    """`transformers.Trainer`."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"loss": (y - labels).square().mean(), "logits": y}

    arguments = TrainingArguments(output_dir="trained", max_steps=10, report_to=[], save_strategy="no")
    trainer = Trainer(
        Model(), arguments, train_dataset=Data(), callbacks=[cudasched.torch.trainer_callback("best_effort")]
    )
    print(f"trained: {trainer.train().global_step} steps")


def with_lightning() -> None:
    """`lightning.Trainer`."""
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return (self.layer(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = lightning.Trainer(
        max_steps=10,
        logger=False,
        enable_checkpointing=False,
        callbacks=[cudasched.torch.lightning_callback("best_effort")],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(Data(), batch_size=8))
    print(f"trained: {trainer.global_step} steps")


def main() -> None:
    """Runs one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=["transformers", "lightning"])
    {"transformers": with_transformers, "lightning": with_lightning}[parser.parse_args().library]()


if __name__ == "__main__":
    main()
