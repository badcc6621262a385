"""Native multi-token-prediction heads: their arithmetic by family, and their folders."""

from mutation import Mutation

FAMILIES = "tests/equivalence/test_mtp_families.py"
FOLDER = "tests/unit/test_mtp_folder.py"
LOOP = "tests/equivalence/test_mtp.py"
SPARSE = "tests/equivalence/test_sparse_heads.py"
HERE = "spectrain/drafters/autoregressive/"

MUTATIONS = (
    Mutation(
        "mtp: token and hidden state exchanged in the projection",
        HERE + "mtp_layer.py",
        "[token, hidden] if self.embedding_first else [hidden, token]",
        "[hidden, token] if self.embedding_first else [token, hidden]",
        (FAMILIES,),
    ),
    Mutation(
        "mtp: fed back behind the norm where it is before it, and the other way round",
        HERE + "mtp_layer.py",
        "return normed if self.feeds_normed else output",
        "return output if self.feeds_normed else normed",
        (FAMILIES,),
    ),
    Mutation(
        "mtp: a later step sees its own key alone, not those of the steps between",
        HERE + "unroll.py",
        "            own_k.append(k_MGd)\n            own_v.append(v_MGd)\n",
        "            own_k[:], own_v[:] = [k_MGd], [v_MGd]\n",
        ("tests/equivalence/test_eagle3_unroll.py", "tests/equivalence/test_mtp.py"),
    ),
    Mutation(
        "mtp: the embedding at position 0 is kept",
        HERE + "unroll.py",
        "0.0) if body.zero_first else rows",
        "0.0) if False else rows",
        (FAMILIES,),
    ),
    Mutation(
        "mtp: reads the hidden state before the target's norm where it is behind it, and the other way round",
        HERE + "mtp.py",
        "self.reads_before_norm = not shape.head.reads_normed",
        "self.reads_before_norm = shape.head.reads_normed",
        (FAMILIES,),
    ),
    Mutation(
        "mtp: gains stored around 0 taken for whole ones",
        HERE + "mtp_layer.py",
        "(normed * (self.offset + self.weight.to(wide.dtype)))",
        "(normed * self.weight.to(wide.dtype))",
        (FAMILIES,),
    ),
    Mutation(
        "mtp: the gate of a head taken for its query",
        HERE + "mtp_layer.py",
        "unflatten(-1, (self.n, -1))[..., : self.d]",
        "unflatten(-1, (self.n, -1))[..., -self.d :]",
        (FAMILIES,),
    ),
    Mutation(
        "overlay: a shard with the old head is read behind the tuned one",
        "spectrain/drafters/overlay.py",
        'return name if name < TUNED_HEAD else f"linked-{name}"',
        "return name",
        (FOLDER,),
    ),
    Mutation(
        "overlay: scales of the head that was quantised stay",
        HERE + "mtp.py",
        "if name.startswith(start) and SCALES.search(name) and",
        "if name.startswith(start) and False and",
        (FOLDER,),
    ),
    Mutation(
        "overlay: stitched, the old head is still there",
        "spectrain/drafters/overlay.py",
        "        if names:\n            _write_kept(path, names, whole)\n",
        "        if False:\n            _write_kept(path, names, whole)\n",
        (FOLDER,),
    ),
    Mutation(
        "mtp: DeepSeek-V3.2 is fed back what GLM-4 is",
        "spectrain/target/mtp_heads.py",
        'replace(_DEEPSEEK, selects="index_topk")',
        'replace(_DEEPSEEK, selects="index_topk", feeds_normed=False)',
        (FAMILIES,),
    ),
    Mutation(
        "mtp: a text beyond what the indexer chooses is trained with all its keys",
        HERE + "mtp.py",
        "            self._check_context(max(batch.lengths()))\n",
        "            pass\n",
        (SPARSE,),
    ),
    Mutation(
        "mtp: a cache grows beyond what the indexer chooses",
        HERE + "mtp.py",
        "            self._check_context(int(cache.columns_B.max()) + 1)\n",
        "            pass\n",
        (SPARSE,),
    ),
    Mutation(
        "mtp: the scales of an indexer go with those of the tuned modules",
        HERE + "mtp.py",
        " and not shape.head.stays(name)",
        "",
        (SPARSE,),
    ),
    Mutation(
        "mtp: MiMo's modules are listed by the names they are stored under",
        "spectrain/target/mtp_heads.py",
        '    served_prefix="model.layers.{N}.",\n',
        "",
        (FOLDER,),
    ),
    Mutation(
        "mtp: a head of 16 bits is not listed as unquantised",
        HERE + "mtp.py",
        "return leave_unquantised(target_config(source), source, served)",
        "return target_config(source)",
        (FOLDER,),
    ),
    Mutation(
        "mtp: GPTQ's rule for a head of 16 bits stands behind one that takes it first",
        "spectrain/drafters/unquantised_modules.py",
        '{f"-:{modules.pattern}": {}, **(fields.get("dynamic") or {})}',
        '{**(fields.get("dynamic") or {}), f"-:{modules.pattern}": {}}',
        ("tests/unit/test_unquantised_modules.py",),
    ),
    Mutation(
        "mtp: codes of a packed head stay beside the tuned one",
        HERE + "mtp_tensors.py",
        "|g_idx|\\.(qweight|qzeros|scales))$",
        ")$",
        ("tests/unit/test_packed_layers.py",),
    ),
)
