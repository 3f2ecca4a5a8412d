"""Measure the faithfulness of a third-party module: is a transformer encoder's layer a step of descent, and on what?

PyTorch's own encoder, untrained, is read layer by layer through hooks. Two energies are tried: a self-attention energy
(quadratic model, uniform targets) and the plain ½‖Z‖², which any callable may be. Random directions are the control.
"""

import torch
from torch import nn

import xentflow as xf

torch.set_num_threads(1)  # tensors here are small: a second thread costs more than it brings

torch.manual_seed(0)
WIDTH, TOKENS = 32, 10
layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False).eval()
Z = torch.randn(16, TOKENS, WIDTH)

flow = xf.GradientFlow(
    xf.CrossEntropy("classes"), xf.Quadratic(torch.eye(WIDTH) / WIDTH), torch.full((TOKENS, TOKENS), 1 / TOKENS)
)
derived = xf.Stack.of(
    xf.derive(flow.objective, xf.Quadratic(torch.eye(WIDTH) / WIDTH), oracle=xf.Uniform(), step=0.1), depth=1
)
energies = {"self-attention energy": flow, "½‖Z‖²": lambda Z: 0.5 * Z.square().sum((-2, -1))}

print(f"{'energy':<24}{'module':<28}{'cosine':>8}{'scale':>9}{'control':>19}")
for energy_name, energy in energies.items():
    for module_name, module in (("nn.TransformerEncoder", encoder), ("derived block", derived)):
        reading = xf.measure_faithfulness(module, energy, Z)
        for name, row in [(module_name, reading), *((f"  layer {x.name}", x) for x in reading.layers)]:
            mean, spread = row.control_cosine
            print(
                f"{energy_name:<24}{name:<28}{row.cosine:>+8.3f}{row.scale:>9.3f}{mean:>+11.3f} ± {spread:.3f}",
            )
assert xf.measure_faithfulness(derived, flow, Z).cosine > 0.99
