"""Uses of a model's class in the libraries whose loops run a model under a plan.

FSDP gives each unit a subclass. planc gives this subclass the name of the original, so that what
asks for a name is right (test_apply_on_meta.py). What takes the class itself is listed here, with
the reason why a subclass is right.
"""

import copy
import importlib.util
import re
from pathlib import Path

import numerics

import planc
from planc.simulate.thread_ranks import run_ranks

LIBRARIES = ("trl", "accelerate", "peft", "lightning.pytorch", "lightning.fabric", "transformers")
LEFT_OUT = re.compile(r"/(experimental|test_utils|tuners|tests|models|cli|quantizers)/")
OF_TRAINER = re.compile(r"transformers/(trainer\w*|modeling_\w+|data/.*|loss/.*|integrations/peft)")
"""The files of transformers that a training loop runs, besides the models."""
CLASS = re.compile(
    r"\btype\((?P<of>[^()\s]*(?:model|module)[^()\s]*)\)(?!\.__(?:name|qualname|module)__)"
    r"|(?P<before>[\w.\[\]]*(?:model|module)[\w.\[\]]*)\.__class__(?!\.__(?:name|qualname|module)__)"
)
NOT_OF_THE_MODEL = "the class of a parameter, a buffer or a configuration"
INHERITED = "a method that the subclass inherits"
ADAPTERS = "planc refuses a model of peft (test_apply_on_meta.py)"
REASONS = {
    "trl/trainer/callbacks.py type(model)": "a plain model, which takes no shards (see below)",
    "trl/trainer/utils.py type(model)": INHERITED,
    "accelerate/big_modeling.py type(module._parameters[name])": NOT_OF_THE_MODEL,
    "accelerate/hooks.py type(module)": "asks for modules of torch.fx, by name",
    "accelerate/hooks.py module.__class__": "of modules of torch.fx alone",
    "accelerate/utils/dataclasses.py module.__class__": "of a plugin of FSDP, which planc refuses",
    "accelerate/utils/fsdp_utils.py type(model)": "asks for FSDP 1",
    "accelerate/utils/modeling.py type(module._parameters[tensor_name])": NOT_OF_THE_MODEL,
    "accelerate/utils/modeling.py model.__class__": "asks for a name among all base classes",
    "accelerate/utils/other.py module[0].__class__": "compiles blocks, which planc refuses",
    "accelerate/utils/other.py module.__class__": "compiles blocks, which planc refuses",
    "peft/peft_model.py self.base_model.__class__": ADAPTERS,
    "peft/peft_model.py self.base_model.model.__class__": ADAPTERS,
    "peft/utils/integrations.py type(module._parameters[name])": NOT_OF_THE_MODEL,
    "peft/utils/hotswap.py type(lora_module.scaling[adapter_name])": ADAPTERS,
    "peft/utils/save_and_load.py model.config.__class__": NOT_OF_THE_MODEL,
    "peft/utils/other.py self.original_module.__class__": ADAPTERS,
    "transformers/modeling_layers.py type(base_model.layers[-1])": "at inference",
    "transformers/modeling_layers.py type(module)": "at inference",
    "transformers/modeling_utils.py submodule.config.__class__": NOT_OF_THE_MODEL,
    "transformers/modeling_utils.py module.__class__": INHERITED,
    "transformers/trainer.py model_to_inspect.__class__": "reads the signature, and the name",
    "transformers/trainer_pt_utils.py module.__class__": "of a plugin of FSDP, which planc refuses",
}


def class_uses(name, text):
    """The uses of a model's class in a file of a library."""
    for found in CLASS.finditer(text):
        yield f"{name} {found[0]}"


def test_each_use_of_a_model_s_class_has_a_reason():
    seen = set()
    for library in LIBRARIES:
        folder = Path(importlib.util.find_spec(library).origin).parent
        for path in folder.rglob("*.py"):
            name = f"{library}/{path.relative_to(folder)}"
            if not LEFT_OUT.search(name) and (library != "transformers" or OF_TRAINER.match(name)):
                seen |= {*class_uses(name, path.read_text())}
    assert seen - REASONS.keys() == set()
    assert len(seen) > 10


def test_an_instance_of_a_model_s_class_is_plain_and_takes_no_shards():
    """TRL's callbacks of averages make one: a run stops, and trains no other model."""
    built = numerics.build("llama")
    models, found = [copy.deepcopy(built) for _ in range(2)], {}

    def program(rank):
        run = planc.apply(models[rank], "llama", device_type="cpu", require="nothing")
        made = type(run.model)(run.model.config)
        try:
            made.load_state_dict(run.model.state_dict())
        except RuntimeError as error:
            found[rank] = type(made), "DTensor" in str(error)

    assert run_ranks(2, program, 60) is None
    assert found == dict.fromkeys(range(2), (type(built), True))


def test_a_use_of_a_class_is_found_and_a_name_is_not():
    text = "if type(self.model) is Llama: pass\nmodel.__class__.__name__\ntype(model).__name__\n"
    assert [*class_uses("x.py", f"{text}model.__class__ in kinds\n")] == [
        "x.py type(self.model)",
        "x.py model.__class__",
    ]
