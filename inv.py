import sys, numpy as np, jax, jax.numpy as jnp, importlib.util
import jaxlm.core
sys.path.insert(0, "/work/wt/memory")
def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path); m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m); return m
old = load("/work/main/src/jaxlm/models/mixers/delta_rule.py", "old"); new = load("/work/wt/memory/src/jaxlm/models/mixers/delta_rule.py", "new")
rng = np.random.default_rng(0)
k = rng.normal(size=16); k = (k/np.linalg.norm(k)).astype(np.float32)
K = np.tile(k, (64, 1)); b = np.tril(K @ K.T, -1).astype(np.float32)
exp = np.linalg.inv(np.eye(64) + b.astype(np.float64))
for m in (old, new):
    for f in (m.unit_lower_inverse, jax.jit(m.unit_lower_inverse)):
        i = np.asarray(f(jnp.asarray(b)[None, None]))[0, 0]
        print(m.__name__, np.abs(i - exp).max(), np.abs((i - exp).sum(1)).max(), np.abs((i-exp).sum(0)).max())
