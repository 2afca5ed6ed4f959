"""Image models of ``timm``, ``torchvision``, ``vit-pytorch``, ``monai``, ``efficientnet-pytorch`` and ``diffusers``."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo_common import Case, image, package, prefixed

ABSENT: dict[str, str] = {}
timm: Any = package("timm", ABSENT)
torchvision: Any = package("torchvision", ABSENT)
vit_pytorch: Any = package("vit_pytorch", ABSENT)
monai: Any = package("monai.networks.nets", ABSENT)
efficientnet: Any = package("efficientnet_pytorch", ABSENT)

TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"depth": 4},
    "deit_tiny_patch16_224": {"depth": 4},
    "deit3_small_patch16_224": {"depth": 4},
    "beit_base_patch16_224": {"depth": 4},
    "eva02_tiny_patch14_224": {"depth": 4},
    "cait_xxs24_224": {"depth": 4},
    "xcit_nano_12_p16_224": {"depth": 4},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1, 1, 1)},
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "convnextv2_atto": {"depths": (1, 1, 1, 1)},
    "mixer_s16_224": {},
    "resmlp_12_224": {},
    "gmlp_s16_224": {},
    "convmixer_768_32": {},
    "poolformer_s12": {},
    "resnet18": {},
    "resnetv2_50": {"layers": (1, 1, 1, 1)},
    "seresnet18": {},
    "regnetx_002": {},
    "mobilenetv3_small_100": {},
    "efficientnet_b0": {},
    "ghostnet_100": {},
    "mobileone_s0": {},
    "levit_128s": {},
    "fastvit_t8": {},
    "edgenext_xx_small": {},
    "pvt_v2_b0": {},
}
TORCHVISION = (
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "densenet121", "vgg11", "squeezenet1_1",
    "shufflenet_v2_x1_0", "mnasnet1_0", "googlenet", "regnet_y_400mf",
)  # fmt: skip
VIT = {"image_size": 224, "patch_size": 16, "num_classes": 1000, "dim": 192, "depth": 4, "heads": 3, "mlp_dim": 768}


def torchvision_model(name: str) -> Case:
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    return image(lambda: torchvision.models.get_model(name, weights=None, **options))


CASES: dict[str, Case] = {}
if timm:
    CASES |= prefixed(
        "timm", {n: image(lambda n=n, o=o: timm.create_model(n, pretrained=False, **o)) for n, o in TIMM.items()}
    )
if torchvision:
    CASES |= prefixed("torchvision", {name: torchvision_model(name) for name in TORCHVISION})
if vit_pytorch:
    from vit_pytorch import SimpleViT, ViT
    from vit_pytorch.cct import CCT
    from vit_pytorch.deepvit import DeepViT

    CASES |= prefixed(
        "vit-pytorch",
        {
            "vit": image(lambda: ViT(**VIT)),
            "simple_vit": image(lambda: SimpleViT(**VIT)),
            "deepvit": image(lambda: DeepViT(**VIT)),
            "cct": image(
                lambda: CCT(
                    img_size=224, embedding_dim=256, n_conv_layers=2, kernel_size=7, stride=2, padding=3, num_layers=4,
                    num_heads=4, mlp_ratio=2.0, num_classes=1000,
                )
            ),
        },
    )  # fmt: skip
if monai:
    unet = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    CASES |= prefixed(
        "monai",
        {
            "unet": image(lambda: monai.UNet(**unet, channels=(16, 32, 64, 128), strides=(2, 2, 2)), 128, 1),
            "attention_unet": image(lambda: monai.AttentionUnet(**unet, channels=(16, 32, 64), strides=(2, 2)), 128, 1),
            "segresnet": image(lambda: monai.SegResNet(**unet, init_filters=8), 128, 1),
        },
    )
if efficientnet:
    CASES["efficientnet-pytorch:b0"] = image(lambda: efficientnet.EfficientNet.from_name("efficientnet-b0"))
