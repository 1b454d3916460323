from jaxlm.systems.forecast.roofline import roofline
from jaxlm.hardware.topologies import parse_topology, speed_of
import jax.numpy as jnp
h = open("/tmp/memory/p27.hlo").read(); s = speed_of(parse_topology("h100-1"), jnp.bfloat16)
o = roofline(h, s, "optimizer"); t = roofline(h, s); print("optimizer", o.total, "rest", t.total - o.total, "delta_rule", roofline(h, s, "delta_rule").total)
