//! Records that are none.

use proptest::prelude::*;

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn a_corrupt_catalogue_file_is_named_and_stays(
        bytes in proptest::collection::vec(any::<u8>(), 0..80), record: bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let home = home();
            let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
            let area = home.pool().meta_path(if record { "volumes" } else { "names" });
            let path = files_below(&area).remove(0);
            std::fs::write(&path, &bytes).unwrap();
            let count = home.files().len();

            let error = home.images.create_volume(new("pvc", MIB)).await.unwrap_err();
            assert!(error.to_string().contains(&path), "{error}");
            let errors = home.images.sweep(StoreKind::Images).await.unwrap();
            assert!(errors.iter().any(|e| e.to_string().contains(&path)));
            let error = home.images.delete_volume(made.handle, none()).await.unwrap_err();
            assert!(error.to_string().contains(&path), "{error}");
            assert_eq!(home.files().len(), count);
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        });
    }
}
