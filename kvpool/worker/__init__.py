"""What a worker does with block ids: tables of them in device memory, and the tensors that they name.

Only this package and the integrations import torch (extra ``torch``). Nothing here is imported by the package itself.
"""
