"""The publications behind the short references in the registry."""

SOURCES = {
    "Bar-Noy, Kipnis and Schieber 1993": "An optimal algorithm for computing census functions in "
    "message-passing systems. Parallel Processing Letters 3.",
    "Barnett et al. 1994": "Building a high-performance collective communication library. SC94.",
    "Bruck et al. 1997": "Efficient algorithms for all-to-all communications in multiport "
    "message-passing systems. IEEE TPDS 8(11).",
    "Chan et al. 2007": "Collective communication: theory, practice, and experience. Concurrency "
    "and Computation: Practice and Experience 19.",
    "Chen et al. 2005": "Performance evaluation of allgather algorithms on terascale Linux cluster "
    "with fast Ethernet. HPC Asia.",
    "Cho et al. 2019": "BlueConnect: decomposing all-reduce for deep learning on heterogeneous "
    "network hierarchy. MLSys.",
    "Cowan et al. 2023": "MSCCLang: Microsoft collective communication language. ASPLOS.",
    "De Sensi et al. 2024": "Swing: short-cutting rings for higher bandwidth allreduce. NSDI.",
    "De Sensi et al. 2025": "Bine trees: enhancing collective operations by optimizing "
    "communication locality. SC25.",
    "Hensgen, Finkel and Manber 1988": "Two algorithms for barrier synchronization. International "
    "Journal of Parallel Programming 17.",
    "Hillis and Steele 1986": "Data parallel algorithms. Communications of the ACM 29(12).",
    "Jeaugey 2025": "PAT: a new algorithm for all-gather and reduce-scatter operations at scale. "
    "arXiv 2506.20252.",
    "Juerss, Addanki and Schmid 2026": "Trivance: latency-optimal AllReduce by shortcutting "
    "multiport networks. arXiv 2602.17254.",
    "Karonis et al. 2000": "Exploiting hierarchy in parallel computer networks to optimize "
    "collective operation performance. IPDPS.",
    "Lei et al. 2025": "FAST: an efficient scheduler for all-to-all GPU communication. "
    "arXiv 2505.09764.",
    "Loch and Koslovski 2021": "Sparbit: a new logarithmic-cost and data locality-aware MPI "
    "allgather algorithm.",
    "Mellor-Crummey and Scott 1991": "Algorithms for scalable synchronization on shared-memory "
    "multiprocessors. ACM TOCS 9(1).",
    "Patarasuk and Yuan 2009": "Bandwidth optimal all-reduce algorithms for clusters of "
    "workstations. JPDC 69(2).",
    "Pjesivac-Grbovic et al. 2007": "Performance analysis of MPI collective operations. Cluster "
    "Computing 10.",
    "Ruefenacht, Bull and Booth 2017": "Generalisation of recursive doubling for allreduce: now "
    "with simulation. Parallel Computing 69.",
    "Sanders and Traff 2002": "The hierarchical factor algorithm for all-to-all communication. "
    "Euro-Par.",
    "Sanders, Speck and Traff 2009": "Two-tree algorithms for full bandwidth broadcast, reduction "
    "and scan. Parallel Computing 35(12).",
    "Stelz, Hubner and Stamatakis 2026": "Bit-reproducible parallel phylogenetic tree inference. "
    "Bioinformatics 42.",
    "Thakur and Choudhary 1994": "All-to-all communication on meshes with wormhole routing. IPPS.",
    "Thakur, Rabenseifner and Gropp 2005": "Optimization of collective communication operations in "
    "MPICH. IJHPCA 19(1).",
    "Traff 2005": "An improved algorithm for (non-commutative) reduce-scatter with an application. "
    "EuroPVM/MPI.",
    "Traff 2024a": "Optimal broadcast schedules in logarithmic time with applications to "
    "broadcast, all-broadcast, reduction and all-reduction. arXiv 2407.18004.",
    "Traff 2024b": "Optimal, non-pipelined reduce-scatter and allreduce algorithms. "
    "arXiv 2410.14234.",
    "Traff 2025": "Communication round and computation efficient exclusive prefix-sums "
    "algorithms (for MPI_Exscan). arXiv 2507.04785.",
    "Traff 2026": "Two efficient message-passing exclusive scan algorithms. arXiv 2604.25667.",
    "Traff and Hunold 2020": "Decomposing MPI collectives for exploiting multi-lane communication. "
    "CLUSTER.",
    "Traff and Rougier 2014": "MPI collectives and datatypes for hierarchical all-to-all "
    "communication. EuroMPI/ASIA.",
}
