"""Models: denoisers, VAEs, encoders. Importing this package imports none of them.

A name is looked up when it is first used (PEP 562), in the module that upstream keeps it in. A name that upstream has
and this project does not have yet is an ``ImportError`` that says so.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

# module -> the public names it holds
_OWN = {
    "cogvideox_transformer3d": "CogVideoXTransformer3DModel",
    "cogvideox_vae": "AutoencoderKLCogVideoX",
    "fantasytalking_audio_encoder": "FantasyTalkingAudioEncoder",
    "fantasytalking_transformer3d": "FantasyTalkingTransformer3DModel",
    "flashhead_audio_encoder": "FlashHeadAudioEncoder",
    "flashhead_transformer3d": "FlashHeadTransformer3DModel",
    "flux2_image_processor": "Flux2ImageProcessor",
    "flux2_transformer2d": "Flux2Transformer2DModel",
    "flux2_transformer2d_control": "Flux2ControlTransformer2DModel",
    "flux2_vae": "AutoencoderKLFlux2",
    "flux_transformer2d": "FluxTransformer2DModel",
    "hunyuanvideo_transformer3d": "HunyuanVideoTransformer3DModel",
    "hunyuanvideo_vae": "AutoencoderKLHunyuanVideo",
    "infinitetalk_audio_encoder": "InfiniteTalkAudioEncoder",
    "infinitetalk_transformer3d": "InfiniteTalkTransformer3DModel",
    "longcatvideo_audio_encoder": "LongCatVideoAudioEncoder Wav2Vec2ModelWrapper",
    "longcatvideo_transformer3d": "LongCatVideoTransformer3DModel",
    "longcatvideo_transformer3d_avatar": "LongCatVideoAvatarTransformer3DModel",
    "longcatvideo_vae": "AutoencoderKLLongCatVideo",
    "ltx2_connecter": "LTX2TextConnectors",
    "ltx2_transformer3d": "LTX2VideoTransformer3DModel",
    "ltx2_vae": "AutoencoderKLLTX2Video",
    "ltx2_vae_audio": "AutoencoderKLLTX2Audio",
    "ltx2_vocoder": "LTX2Vocoder LTX2VocoderWithBWE",
    "mova_audio_transformer3d": "WanAudioTransformer3DModel",
    "mova_interactionv2": "MOVADualTowerConditionalBridge",
    "mova_model": "MOVAModel",
    "mova_vae_audio": "AutoencoderKLMOVAAudio",
    "qwenimage_transformer2d": "QwenImageTransformer2DModel",
    "qwenimage_transformer2d_control": "QwenImageControlTransformer2DModel",
    "qwenimage_transformer2d_instantx": "QwenImageInstantXControlNetModel",
    "qwenimage_vae": "AutoencoderKLQwenImage",
    "turbowan_transformer3d": "TurboWanTransformer3DModel",
    "wan_audio_encoder": "WanAudioEncoder",
    "wan_image_encoder": "CLIPModel",
    "wan_text_encoder": "WanT5EncoderModel",
    "wan_transformer3d": "Wan2_2Transformer3DModel WanRMSNorm WanSelfAttention WanTransformer3DModel",
    "wan_transformer3d_animate": "Wan2_2Transformer3DModel_Animate",
    "wan_transformer3d_s2v": "Wan2_2Transformer3DModel_S2V",
    "wan_transformer3d_vace": "VaceWanTransformer3DModel",
    "wan_vae": "AutoencoderKLWan AutoencoderKLWan_",
    "wan_vae3_8": "AutoencoderKLWan2_2_ AutoencoderKLWan3_8",
    "z_image_transformer2d": "ZImageTransformer2DModel",
    "z_image_transformer2d_control": "ZImageControlTransformer2DModel",
}
# names of the libraries that upstream re-exports
_LIBRARIES = {
    "diffusers": "AutoencoderKL",
    "transformers": (
        "AutoProcessor AutoTokenizer CLIPImageProcessor CLIPTextModel CLIPTokenizer "
        "CLIPVisionModelWithProjection Gemma3ForConditionalGeneration Gemma3Processor GemmaTokenizer "
        "GemmaTokenizerFast LlamaModel LlamaTokenizerFast LlavaForConditionalGeneration "
        "Mistral3ForConditionalGeneration PixtralProcessor Qwen3Config Qwen3ForCausalLM T5EncoderModel "
        "T5Tokenizer T5TokenizerFast UMT5EncoderModel Wav2Vec2FeatureExtractor"
    ),
}
# of these, the ones that are None when the library is too old to have them
_OPTIONAL = frozenset(
    {
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2Tokenizer",
        "Qwen2VLProcessor",
        "Qwen3VLForConditionalGeneration",
    }
)

_MODULE_OF = {name: module for module, names in _OWN.items() for name in names.split()}
_LIBRARY_OF = {name: module for module, names in _LIBRARIES.items() for name in names.split()}

__all__ = sorted({*_MODULE_OF, *_LIBRARY_OF, *_OPTIONAL})


def _exists(module: str) -> bool:
    return importlib.util.find_spec(f"{__name__}.{module}") is not None


def available_names() -> list[str]:
    """The model names that this installation can import."""
    return sorted(name for name, module in _MODULE_OF.items() if _exists(module))


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        module = _MODULE_OF[name]
        if not _exists(module):
            raise ImportError(f"{__name__}.{name} is a name of VideoX-Fun that this project does not implement yet")
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    elif name in _LIBRARY_OF:
        value = getattr(importlib.import_module(_LIBRARY_OF[name]), name)
    elif name in _OPTIONAL:
        value = getattr(importlib.import_module("transformers"), name, None)
    elif not name.startswith("_") and _exists(name):
        return importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
