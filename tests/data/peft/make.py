"""Makes the files beside it with peft (0.21.2), which tests do not import because that takes seconds.

    python tests/data/peft/make.py

A small ViT (base/) gets adapters by peft, is trained by it for a few steps, in float64 so that no machine's rounding
matters, and saved by it (adapter/).
golden.safetensors holds the images and labels, the adapters' initial values, the losses, and the logits and merged
matrices at the end.
"""

import json
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import vitlab

FOLDER = Path(__file__).parent
STEPS, RATE, DECAY = 6, 1e-2, 0.05


def main() -> None:
    torch.manual_seed(0)
    base = vitlab.create("vit_digits", width=24, depth=2, heads=3, image_size=(8, 12), classes=5)
    vitlab.save(base, FOLDER / "base")
    images, labels = torch.randn(16, 1, 8, 12), torch.arange(16) % 5
    names = ["attention.qkv", "attention.proj"]
    options = peft.LoraConfig(r=3, lora_alpha=5, target_modules=names, modules_to_save=["head"])
    model = peft.get_peft_model(base, options).train().double()
    golden = {"images": images, "labels": labels}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    golden |= {f"initial.{name}": p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=DECAY)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.double()), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    golden |= {f"final.{name}": p.detach().clone() for name, p in trained.items()}
    model.float()
    golden |= {"losses": torch.stack(losses), "logits": model(images).detach()}
    model.save_pretrained(FOLDER / "adapter")
    (FOLDER / "adapter" / "README.md").unlink(missing_ok=True)
    config = json.loads((FOLDER / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    (FOLDER / "adapter" / "adapter_config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    merged = model.merge_and_unload().state_dict()
    golden |= {f"merged.{key}": value.clone() for key, value in merged.items() if ".attention." in key}
    save_file(golden, FOLDER / "golden.safetensors")


if __name__ == "__main__":
    main()
