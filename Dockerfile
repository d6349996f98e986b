# The image of one kvstrata node: the binary and the C library it needs, nothing else.
FROM rust:1.95-bookworm AS builder
# RocksDB's bindings are made from its headers by libclang.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libclang-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY . .
# The cache mounts outlive the build, so a changed source file does not recompile every crate.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/build/target \
    cargo build --release --locked --bin kvstrata \
    && install -D -m 0755 target/release/kvstrata /out/kvstrata

FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=builder /out/kvstrata /usr/bin/kvstrata
USER 65532:65532
EXPOSE 9400 9401 9402
ENTRYPOINT ["/usr/bin/kvstrata"]
CMD ["serve"]
