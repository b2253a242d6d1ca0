"""Steps of training on a GPU, measured when all messages were staged and hosts waited in layers.

On 2026-11-26 at commit 8a14c18-dirty, on one NVIDIA H200 for 2 ranks over Open MPI 5.0.11.
"""

MILLISECONDS = {
    "server-sync": 22.9,
    "server-async": 16.1,
    "ddp": 19.7,
    "ddp float16 hook": 19.9,
    "ddp int8 hook": 22.6,
    "ddp PowerSGD 4": 42.7,
    "zero1": 23.8,
    "zero2": 24.8,
    "zero3": 28.2,
    "zero3 kept": 23.9,
    "zero3 host": 30.9,
    "hsdp": 31.5,
    "zeropp": 46.2,
    "local-updates 5": 18.5,
    "tensor": 47.5,
    "context": 35.9,
    "pipe": 42.7,
    "expert": 41.2,
}
